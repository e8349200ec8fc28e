"""The groups of weights that can be transferred and frozen (Choi 2024, Sec. 3)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fairseq_fastweights.invalid_input import InvalidInput

GROUPS = ("embeddings", "output", "feed-forward", "output-projection", "attention")

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

# By group: the beginnings of names after `decoder.`, and after `decoder.layers.<number>.`
_OF_DECODER: dict[str, tuple[str, ...]] = {
    "embeddings": ("embed_tokens.", "embed_positions.", "project_in_dim.", "layernorm_embedding."),
    "output": ("layer_norm.", "project_out_dim.", "output_projection.", "adaptive_softmax."),
}
_OF_LAYER: dict[str, tuple[str, ...]] = {
    "attention": tuple(f"self_attn.{part}." for part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "in_proj")),
    # With the scales and norms of the attention's output.
    "output-projection": (
        *(f"self_attn.{part}_proj." for part in ("out", "o", "output_gate")),
        *("attn_ln.", "c_attn"),
    ),
    "feed-forward": ("fc1.", "fc2.", "ffn_layernorm.", "w_resid"),
}


def parse_groups(argument: str, text: str) -> frozenset[str]:
    """Reads "all", "none", or comma-separated `GROUPS`; raises a `ValueError` for any other word."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["all"]:
        return frozenset(GROUPS)
    if words == ["none"]:
        return frozenset()
    if not set(words) <= set(GROUPS):
        raise InvalidInput(f"{argument} is {text!r}; it must be all, none, or comma-separated: {', '.join(GROUPS)}")
    return frozenset(words)


def group_of(name: str, layers: int, pre_norm: bool) -> str | None:
    """The group of a parameter of a Transformer language model; None for parameters that a Transformer lacks, as gates.

    A norm belongs to the part after it. If norms follow the parts, the attention's norm belongs to the feed-forward
    network, and the feed-forward network's norm to the next layer's attention, or to the output.

    Args:
        name: fairseq's name of the parameter.
        layers: number of layers of the model.
        pre_norm: whether norms come before each part of a layer, or after it.
    """
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return _look_up(name.removeprefix("decoder."), _OF_DECODER) if name.startswith("decoder.") else None
    number, part = int(in_layer[1]), in_layer[2]
    if part.startswith("self_attn_layer_norm."):
        return "attention" if pre_norm else "feed-forward"
    if part.startswith("final_layer_norm."):
        if pre_norm:
            return "feed-forward"
        return "attention" if number + 1 < layers else "output"
    return _look_up(part, _OF_LAYER)


def attention_of(name: str, pre_norm: bool) -> str | None:
    """The path, with a dot at its end, of the attention that a parameter of that group belongs to or precedes.

    None for parameters outside the layers.
    """
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return None
    follows = not pre_norm and in_layer[2].startswith("final_layer_norm.")
    return f"decoder.layers.{int(in_layer[1]) + follows}.self_attn."


def count_layers(names: Iterable[str]) -> int:
    """The number of layers of a model with parameters of these names."""
    found = [_LAYER.match(name) for name in names]
    return len({match[1] for match in found if match})


def _look_up(part: str, table: dict[str, tuple[str, ...]]) -> str | None:
    return next((group for group, starts in table.items() if part.startswith(starts)), None)
