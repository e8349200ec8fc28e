"""fairseq models. fairseq imports every module of this folder, which registers the models and architectures in it."""
