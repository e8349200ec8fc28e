"""The families of Hugging Face's models that can be converted, by their model_type.

They become `fast_weight_lm` with their softmax and linear attention. fairseq's dictionary starts with <s>, <pad>, </s>,
<unk>. </s> is the folder's end-of-text token; the other tokens follow in their order, with their ids as symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Importing these enters their readers into `FAMILIES`.
from fairseq_fastweights.conversion.families import fla, gpt, hybrid, llama  # noqa: F401
from fairseq_fastweights.conversion.families.family import FAMILIES, SERVED, Family
from fairseq_fastweights.conversion.families.hybrid import qwen3_5_name, qwen3_5_text_config
from fairseq_fastweights.invalid_input import InvalidInput

__all__ = ["FAMILIES", "SERVED", "Family", "is_buffer", "language_model", "read_family"]

_EXPERTS = dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"), "which has experts")
_UNSUPPORTED = {"kimi_linear": "which has experts and compressed keys", **_EXPERTS}
"""Models that are near to those of `FAMILIES`, and the parts that `fast_weight_lm` lacks."""


def language_model(config: dict[str, Any]) -> tuple[dict[str, Any], Callable[[str], str | None]]:
    """Finds the language model in a model that may have other parts.

    Args:
        config: the contents of config.json.

    Returns:
        the contents of config.json, had the language model been saved alone, and a function from a weight's name in the
        folder to its name then, None for weights of other parts.
    """
    if config.get("model_type") == "qwen3_5":
        return qwen3_5_text_config(config), qwen3_5_name
    return config, qwen3_5_name if config.get("model_type") == "qwen3_5_text" else str


def read_family(config: dict[str, Any], names: set[str], end_of_text: int | None = None) -> Family:
    """Reads a model's config.json.

    Args:
        config: its contents.
        names: of the weights in the folder, which distinguish variants of a model.
        end_of_text: id of the end-of-text token, if the configuration has none.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _UNSUPPORTED:
        raise InvalidInput(f"config.json: model_type is {kind!r}, {_UNSUPPORTED[kind]}, which is not supported")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InvalidInput(f"config.json: model_type is {kind!r}; it must be one of {', '.join(FAMILIES)}")
    return FAMILIES[kind](config, names, end_of_text)


def is_buffer(name: str) -> bool:
    """True if a name in the weight files is that of a buffer, such as a causal mask, which is not learned."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")) or (
        name.endswith("rotary_emb.inv_freq")
    )
