"""Models that fairseq trained, as Hugging Face folders: `to-huggingface`."""
