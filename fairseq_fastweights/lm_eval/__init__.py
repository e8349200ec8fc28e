"""The language models as lm-evaluation-harness runs them: `python -m fairseq_fastweights.lm_eval`."""
