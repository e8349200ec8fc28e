"""The demo of translation: `make demo-translation`."""
