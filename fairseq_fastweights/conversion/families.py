"""What of Hugging Face's models is what of `fast_weight_lm` with softmax attention, by their model_type.

fairseq's dictionary starts with <s>, <pad>, </s>, <unk>. </s> is the source's end of text; the other word types follow
in their order, under their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq_fastweights.conversion.family import Family
from fairseq_fastweights.conversion.gpt_families import gpt2, gpt_neox
from fairseq_fastweights.conversion.llama_families import llama, mistral, qwen2, qwen3

__all__ = ["FAMILIES", "Family", "buffers", "read_family"]

FAMILIES: dict[str, Callable[[dict[str, Any], set[str], int | None], Family]] = {
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
"""Called with what config.json holds, the weights' names, and the end of text where the configuration has none."""


def read_family(config: dict[str, Any], names: set[str], end_of_text: int | None = None) -> Family:
    """Works out how a model is read from its config.json and the names of its weights.

    Args:
        config: what config.json holds.
        names: of the weights in the folder, which tell variants of the same model apart.
        end_of_text: used where the configuration names none.

    Raises:
        ValueError: for another family, and for settings that have no counterpart, by name.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"config.json: model_type is {kind!r}; it must be one of {', '.join(FAMILIES)}")
    return FAMILIES[kind](config, names, end_of_text)


def buffers(name: str) -> bool:
    """Whether a name in the weight files is that of a buffer: a causal mask or a table, which hold nothing learnt."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")) or (
        name.endswith("rotary_emb.inv_freq")
    )
