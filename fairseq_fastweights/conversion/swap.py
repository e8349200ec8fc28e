"""A mixer in the place of trained softmax attention (Mao 2022, Sec. 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.projections import shared

ADDITIVE_SCALE = 1 / 512
"""What values are multiplied by for the additive rule without normalisation (footnote 4)."""

WRITE_STRENGTH = 0.007
"""The delta rule's, at the start (footnote 3)."""


class Start(NamedTuple):
    """Where a parameter starts: its values, and how they were made: "kept", "rescaled", "folded" or "new"."""

    values: Tensor
    how: str


def check_swap(attention: Mixer) -> None:
    """Checks that a mixer that takes attention's weights can start at the weights of a softmax attention of its width.

    Raises:
        ValueError: if its keys are longer than what a map folded into the projections can give, or its write strengths
            need a bias that they have not.
    """
    if not isinstance(attention, FastWeightAttention):
        return
    if attention.feature_map.key_dim > attention.head_dim:
        raise ValueError(
            f"feature_dim is {attention.feature_map.key_dim}; with the feature map {attention.feature_map_name} it "
            f"must be at most the {attention.head_dim} numbers that the source's keys and queries have per head "
            "(relu, favor and dpfp make more of them)"
        )
    if attention.feature_map.key_dim < attention.head_dim and not isinstance(attention.q_norm, nn.Identity):
        raise ValueError(
            f"feature_dim is {attention.feature_map.key_dim}; with query_key_norm_eps it must be the "
            f"{attention.head_dim} numbers that are normalised in each head"
        )
    if attention.update_rule == "delta" and _gate(attention, "beta").bias is None:
        raise ValueError(
            f"no_attention_bias is set; the delta rule in place of a trained attention starts at a write strength of "
            f"{WRITE_STRENGTH}, which is kept in a bias: it must not be set"
        )


def reads_without_scale(attention: Mixer) -> bool:
    """Whether nothing makes up for the 1 / sqrt(head dim) by which the source's attention multiplies what it compares.

    Normalised keys and queries or read-outs need no scale, and the sum rule's values are scaled (`_value_scale`).
    """
    return (
        isinstance(attention, FastWeightAttention)
        and not attention.normalization
        and attention.update_rule != "sum"
        and attention.scale == 1
    )


def swap(attention: Mixer, weights: Mapping[str, Tensor]) -> dict[str, Start]:
    """Where a mixer starts that takes the place of an attention with these weights.

    Those of softmax over fewer keys stay as they are. In a memory queries and keys keep theirs where the map takes
    head_dim numbers; where it takes m < head_dim, both are multiplied by `fold_map`. The decay rule's values are
    multiplied by 1 - sigmoid(b_z), b_z the biases of their gates, or the mean of that over the heads that share them;
    those of the sum rule without normalisation by 1 / 512. Without an input, the delta rule's write strength is 0.007.

    Args:
        attention: what `check_swap` passes; it is not changed.
        weights: "q_proj.weight" (heads * head_dim, embed_dim), "q_proj.bias" if there is one, the same of k_proj and
            v_proj, whose heads may be fewer, and the norms of queries and keys.

    Returns:
        starts of parameters of `attention`, by name. Those that are missing start as they are.
    """
    starts = {name: Start(tensor, "kept") for name, tensor in weights.items()}
    if not isinstance(attention, FastWeightAttention):
        return starts
    m = attention.feature_map.key_dim
    if m < attention.head_dim:
        fold = fold_map(weights["q_proj.weight"], weights["k_proj.weight"], attention.num_heads, m)
        for name, tensor in weights.items():
            if not name.startswith("v_proj."):
                starts[name] = Start(_fold(fold, tensor), "folded")
    scale = _value_scale(attention)
    if scale is not None:
        for name in ("v_proj.weight", "v_proj.bias"):
            if name in weights:
                tensor = weights[name].to(scale.dtype)
                starts[name] = Start(tensor * scale.view(-1, *[1] * (tensor.dim() - 1)), "rescaled")
    if attention.update_rule == "delta":
        projection = _gate(attention, "beta")
        bias = torch.full_like(projection.bias.detach(), math.log(WRITE_STRENGTH / (1 - WRITE_STRENGTH)))
        starts["beta_proj.weight"] = Start(torch.zeros_like(projection.weight.detach()), "new")
        starts["beta_proj.bias"] = Start(bias, "new")
    return starts


def fold_map(q_weight: Tensor, k_weight: Tensor, heads: int, m: int) -> Tensor:
    """The linear map of each head's keys, and of the queries that they serve, to m numbers that keeps most of them.

    Its rows are the leading left singular vectors of the head's projections side by side: of all maps with m
    orthonormal rows, none leaves a larger norm of them.

    Args:
        q_weight, k_weight: (heads * head_dim, width), of which those of keys may be fewer.
        heads: of queries.
        m: numbers.

    Returns:
        (heads of keys, m, head_dim), float64.
    """
    head_dim = len(q_weight) // heads
    keys = _by_head(k_weight, head_dim)
    queries = _by_head(q_weight, head_dim).unflatten(0, (len(keys), -1)).transpose(1, 2).flatten(2)
    vectors = torch.linalg.svd(torch.cat([queries, keys], dim=-1).double(), full_matrices=False)[0]
    vectors = vectors[..., :m].transpose(1, 2)
    # A singular vector's sign is open; maps that are not linear would notice.
    largest = vectors.gather(-1, vectors.abs().argmax(-1, keepdim=True))
    return vectors * largest.sign()


def _fold(fold: Tensor, tensor: Tensor) -> Tensor:
    """Applies each head's map to a projection's weight or bias."""
    heads = _by_head(tensor, fold.shape[2]).double()
    folded = shared(fold, len(heads), 0) @ heads
    return folded.reshape(-1, *tensor.shape[1:]).to(tensor.dtype)


def _by_head(tensor: Tensor, head_dim: int) -> Tensor:
    """(heads * head_dim, width), or a bias -> (heads, head_dim, width or 1)."""
    return tensor.detach().reshape(tensor.shape[0] // head_dim, head_dim, -1)


def _value_scale(attention: FastWeightAttention) -> Tensor | None:
    """(heads of values * head_dim,), what each value dimension is multiplied by, or None."""
    values = attention.v_proj.out_features
    if attention.update_rule == "decay":
        let_in = torch.sigmoid(-_gate(attention, "value_decay").bias.detach())
        return let_in.view(values // attention.head_dim, -1, attention.head_dim).mean(1).flatten()
    if attention.update_rule == "sum" and not attention.normalization:
        return torch.full((values,), ADDITIVE_SCALE)
    return None


def _gate(attention: FastWeightAttention, name: str) -> Any:
    return attention.get_submodule(f"{name}_proj")
