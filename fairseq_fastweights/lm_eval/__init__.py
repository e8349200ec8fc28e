"""Language models for lm-evaluation-harness: `python -m fairseq_fastweights.lm_eval`."""
