"""The demo of language models: `make demo`."""
