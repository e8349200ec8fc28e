"""Families of models of transformers: one file for each shape of layers."""

# Importing these enters their readers into `table.FAMILIES`.
from fairseq_fastweights.conversion.families import fla, gpt, hybrid, llama  # noqa: F401
