"""Trained models from elsewhere: `python -m fairseq_fastweights.conversion` reads and writes Hugging Face folders."""
