"""The former place of `to_huggingface.own_classes.load_for_causal_lm`."""

import warnings

from fairseq_fastweights.conversion.to_huggingface.own_classes import load_for_causal_lm as load_for_causal_lm

warnings.warn(
    f"{__name__} has moved: import load_for_causal_lm from {load_for_causal_lm.__module__}",
    DeprecationWarning,
    stacklevel=2,
)
