"""The files of a model on disk: folders, checkpoints of fairseq, weights."""
