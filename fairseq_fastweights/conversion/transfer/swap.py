"""Initial values of a mixer that replaces trained softmax attention (Mao 2022, Sec. 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.projections import shared
from fairseq_fastweights.mixers.update_rules import DELTA_RULES

ADDITIVE_SCALE = 1 / 512
"""The factor of values for the additive rule without normalisation (footnote 4)."""

BETA = 0.007
"""The delta rule's initial beta (footnote 3)."""


Start = tuple[Tensor, str]
"""The initial values of a parameter, and how they were made: "kept", "rescaled", "folded" or "new"."""


def check_swap(attention: Mixer) -> None:
    """Checks that a mixer can start at the weights of a softmax attention of its width."""
    if not isinstance(attention, FastWeightAttention):
        return
    if attention.feature_map.key_dim > attention.head_dim:
        raise InvalidInput(
            f"feature_dim is {attention.feature_map.key_dim}; with the feature map {attention.feature_map_name} it "
            f"must be at most the {attention.head_dim} numbers of the base model's keys and queries per head "
            "(relu, favor and dpfp make more of them)"
        )
    if attention.feature_map.key_dim < attention.head_dim and not isinstance(attention.q_norm, nn.Identity):
        raise InvalidInput(
            f"feature_dim is {attention.feature_map.key_dim}; with query_key_norm_eps it must be the "
            f"{attention.head_dim} numbers that are normalised in each head"
        )
    if attention.update_rule in DELTA_RULES and _gate(attention, "beta").bias is None:
        raise InvalidInput(
            f"no_attention_bias is set; the delta rule in place of a trained attention starts at beta {BETA}, which is "
            "kept in a bias: it must not be set"
        )


def lacks_scale(attention: Mixer) -> bool:
    """True if a mixer lacks the factor 1 / sqrt(head dim) of softmax attention, and nothing replaces it.

    Normalised keys and queries or outputs need no scale, and the sum rule's values are scaled (`_value_scale`).
    """
    return (
        isinstance(attention, FastWeightAttention)
        and not attention.normalization
        and attention.update_rule != "sum"
        and attention.scale == 1
    )


def swap(attention: Mixer, weights: Mapping[str, Tensor]) -> dict[str, Start]:
    """Computes the initial values of a mixer that replaces an attention with these weights.

    Softmax over fewer keys takes the weights as they are. Linear attention takes those of queries and keys as they are
    if its feature map takes head_dim numbers; if it takes m < head_dim, both are multiplied by `fold_map`. The decay
    rule's values are multiplied by 1 - sigmoid(b_z), where b_z are the biases of their gates, or the mean of that over
    the heads that share them; those of the sum rule without normalisation by 1 / 512. The delta rule's beta starts at
    0.007 for an input of zeros.

    Args:
        attention: a mixer that `check_swap` accepts; it is not changed.
        weights: "q_proj.weight" (heads * head_dim, embed_dim), "q_proj.bias" if there is one, the same of k_proj and
            v_proj, which may have fewer heads, and the norms of queries and keys.

    Returns:
        initial values of parameters of `attention`, by name. Parameters that are missing stay as they are.
    """
    starts = {name: (tensor, "kept") for name, tensor in weights.items()}
    if not isinstance(attention, FastWeightAttention):
        return starts
    # q and k of m numbers per head: both are multiplied by the same map, so that products change least.
    m = attention.feature_map.key_dim
    if m < attention.head_dim:
        fold = fold_map(weights["q_proj.weight"], weights["k_proj.weight"], attention.num_heads, m)
        for name, tensor in weights.items():
            if not name.startswith("v_proj."):
                starts[name] = (_fold(fold, tensor), "folded")
    scale = _value_scale(attention)
    if scale is not None:
        for name in ("v_proj.weight", "v_proj.bias"):
            if name in weights:
                tensor = weights[name].to(scale.dtype)
                starts[name] = (tensor * scale.view(-1, *[1] * (tensor.dim() - 1)), "rescaled")
    if attention.update_rule in DELTA_RULES:
        projection = _gate(attention, "beta")
        bias = torch.full_like(projection.bias.detach(), math.log(BETA / (1 - BETA)))
        starts["beta_proj.weight"] = (torch.zeros_like(projection.weight.detach()), "new")
        starts["beta_proj.bias"] = (bias, "new")
    return starts


def fold_map(q_weight: Tensor, k_weight: Tensor, heads: int, m: int) -> Tensor:
    """The linear map of each head's keys and queries to m dimensions that preserves most of them.

    Its rows are the leading left singular vectors of the concatenated projections of the head's queries and keys: of
    all maps with m orthonormal rows, this one leaves the largest norm.

    Args:
        q_weight, k_weight: (heads * head_dim, width); keys may have fewer heads.
        heads: number of heads of queries.
        m: number of dimensions.

    Returns:
        (heads of keys, m, head_dim), float64.
    """
    head_dim = len(q_weight) // heads
    # (heads of keys, head_dim, width), and queries side by side: (heads of keys, head_dim, group * width)
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
    """Reshapes a weight (heads * head_dim, width), or a bias, to (heads, head_dim, width or 1)."""
    return tensor.detach().reshape(tensor.shape[0] // head_dim, head_dim, -1)


def _value_scale(attention: FastWeightAttention) -> Tensor | None:
    """The factors of value dimensions, (heads of values * head_dim,), or None."""
    values = attention.v_proj.out_features
    if attention.update_rule == "decay":
        let_in = torch.sigmoid(-_gate(attention, "value_decay").bias.detach())
        return let_in.view(values // attention.head_dim, -1, attention.head_dim).mean(1).flatten()
    if attention.update_rule == "sum" and not attention.normalization:
        return torch.full((values,), ADDITIVE_SCALE)
    return None


def _gate(attention: FastWeightAttention, name: str) -> Any:
    return attention.get_submodule(f"{name}_proj")
