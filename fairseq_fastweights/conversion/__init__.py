"""Conversion of trained models: `python -m fairseq_fastweights.conversion` reads and writes Hugging Face folders."""
