"""Weights of a trained Transformer in a model with other mixers."""
