"""Families of models of transformers: one file for each shape of layers."""
