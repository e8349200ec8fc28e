"""Conversion of trained models: `python -m fairseq_fastweights.conversion` reads and writes Hugging Face folders."""

from fairseq_fastweights.conversion import former_names as former_names
