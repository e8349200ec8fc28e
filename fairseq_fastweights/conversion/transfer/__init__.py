"""Weights of a trained Transformer in a model with other mixers."""

from functools import partial

from fairseq_fastweights.conversion.former_names import attribute

__getattr__ = partial(attribute, __name__, "weights")
