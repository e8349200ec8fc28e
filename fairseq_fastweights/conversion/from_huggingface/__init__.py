"""Hugging Face folders, and files that other programs read, as models for fairseq: `from-huggingface`."""
