"""Published models' families: how the settings and weights of each are those of a `fast_weight_lm`."""

from functools import partial

from fairseq_fastweights.conversion.former_names import attribute

__getattr__ = partial(attribute, __name__, "table")
