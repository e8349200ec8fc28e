"""Tokenizers of Hugging Face folders, as fairseq reads them."""
