"""fairseq tasks. fairseq imports every module of this folder, which registers what it holds."""

from fairseq_fastweights.data import byte_level_bpe  # noqa: F401  which registers --bpe byte_level
