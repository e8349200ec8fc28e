"""Linear attention for fairseq and transformers: the package for fairseq's `--user-dir fairseq_fastweights`."""
