"""The number of heads of a transfer's source: a model whose weights of attention are taken has as many."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from fairseq_fastweights.conversion.transfer.source import Source
from fairseq_fastweights.invalid_input import InvalidInput

logger = logging.getLogger(__name__)

_NAME = "decoder_attention_heads"
_OPTION = "--decoder-attention-heads"


def follow_source(options: Any, source: Source, groups: frozenset[str]) -> None:
    """Sets a model's number of heads to that in the settings of the source, unless another one was asked for.

    The shapes of weights do not tell how many heads cut them up. So an architecture's number may be wrong for a
    checkpoint that fits it otherwise, and the model would be another one.

    Args:
        options: those of the model; they are changed.
        source: what its weights are taken from.
        groups: which of its weights; without attention, nothing is done.

    Raises:
        ValueError: if the source's settings have a number that cannot be.
    """
    theirs, ours = source.options.get(_NAME), getattr(options, _NAME, None)
    if "attention" not in groups or ours is None:
        return
    if theirs is None:
        logger.warning("transfer_from: the settings of %s do not say %s; it is taken for %s", source.file, _NAME, ours)
        return
    width = options.decoder_embed_dim
    if type(theirs) is not int or theirs < 1 or (getattr(options, "head_dim", 0) == 0 and width % theirs):
        raise InvalidInput(
            f"{source.file} has {_NAME} {theirs!r} in its settings; it must be a divisor of decoder_embed_dim, {width}"
        )
    told = ""
    if theirs != ours and not _was_asked_for(options):
        options.decoder_attention_heads = theirs
        told = f", and so has the model, not {ours} as its architecture"
    logger.info("transfer_from: the settings of %s say %s %s%s", source.file, _NAME, theirs, told)


def _was_asked_for(options: Any) -> bool:
    """True if the number is another one than the architecture's, or stands on the command line."""
    alone = Namespace()
    ARCH_CONFIG_REGISTRY[getattr(options, "_name", None) or options.arch](alone)
    default = getattr(alone, _NAME, TransformerLanguageModelConfig.decoder_attention_heads)
    words = [word.partition("=")[0] for word in sys.argv[1:]]
    return options.decoder_attention_heads != default or _OPTION in words or f"model.{_NAME}" in words
