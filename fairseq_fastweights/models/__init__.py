"""fairseq models. fairseq imports every module of this folder, which registers what it holds."""
