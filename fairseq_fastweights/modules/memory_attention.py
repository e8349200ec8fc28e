"""What attention over a fast weight memory is made of, whoever writes the memory and whoever reads it."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from fairseq_fastweights.feature_maps import Scales, build_feature_map, sum_normalize
from fairseq_fastweights.modules.update_rules import (
    NORMALIZATIONS,
    UPDATE_RULES,
    check_normalization,
    known_to_diverge,
    lookup,
)

logger = logging.getLogger(__name__)

SMALLEST_DIVISOR = 1e-30
"""Sums by which attention normalisation divides are taken for 0 below it; gradients have float32's range above it."""

_warned_of: set[str] = set()


@with_incremental_state
class MemoryAttention(nn.Module):
    """The projections, feature map and normalisation that all attention over a fast weight memory has.

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: number of heads, a divisor of `embed_dim`. Values have head_dim = embed_dim / num_heads numbers.
        source_dim: width of what keys and values are made from; None for `embed_dim`.
        update_rule: a key of `UPDATE_RULES`.
        feature_map: a key of `feature_maps.FEATURE_MAPS`, None for what the rule's paper uses.
        feature_dim: size m of keys and queries after the feature map: the state is m x head_dim. None for what
            follows from the head dim.
        dpfp_nu, favor_features: the sizes of these maps.
        normalization: any of "sum", "attention", "removal"; None for what the rule's paper uses.
        bias: whether the projections have biases. Decay gates always have.
        scale_read_out: whether the read-out is multiplied by 1 / sqrt(head_dim).
        dropout: of the read-out, before the output projection: there are no attention weights to drop.
        q_noise, qn_block_size: quantisation noise for the projections, as fairseq has it.

    Raises:
        ValueError: naming the argument, what it was and what it may be.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        update_rule: str,
        source_dim: int | None = None,
        feature_map: str | None = None,
        feature_dim: int | None = None,
        dpfp_nu: int = 1,
        favor_features: int | None = None,
        normalization: frozenset[str] | None = None,
        bias: bool = True,
        scale_read_out: bool = False,
        dropout: float = 0.0,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must be a divisor of embed_dim, {embed_dim}")
        rule = lookup("update_rule", update_rule, UPDATE_RULES)
        normalization = rule.normalization if normalization is None else frozenset(normalization)
        if not normalization <= set(NORMALIZATIONS):
            raise ValueError(f"normalization is {sorted(normalization)}; it may hold {', '.join(NORMALIZATIONS)}")
        check_normalization(normalization, update_rule)
        if "removal" in normalization and not rule.corrects:
            raise ValueError(f"normalization holds 'removal', but the {update_rule} rule removes nothing")
        self.embed_dim = embed_dim
        self.source_dim = embed_dim if source_dim is None else source_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.update_rule = update_rule
        self.rule = rule
        self.normalization = normalization
        feature_map = feature_map or rule.feature_map
        self.feature_map_name = feature_map
        self.feature_map = build_feature_map(
            feature_map,
            num_heads=num_heads,
            head_dim=self.head_dim,
            feature_dim=feature_dim,
            dpfp_nu=dpfp_nu,
            favor_features=favor_features,
        )
        if "removal" in normalization and not self.feature_map.positive:
            raise ValueError(
                f"normalization holds 'removal' and feature_map is {feature_map!r}; it must be a map without negative "
                "outputs: what is removed is divided by a sum of them"
            )
        # Normalisers grow with time, their inverses shrink, and exp() of FAVOR+'s exponents is large unless sum
        # normalisation takes it back; and a memory that fades over thousands of steps, read before it is normalised,
        # holds sums of as many products: float16 has not the range for them.
        self.needs_float32_range = (
            bool(normalization & {"attention", "removal"})
            or (feature_map == "favor" and "sum" not in normalization)
            or rule.gated_read_out
        )
        self._scales: Scales = "fixed"
        if "sum" in normalization:
            self._scales = "all"
        elif "attention" in normalization:
            self._scales = "queries"
        self.scale = self.head_dim**-0.5 if scale_read_out else 1.0
        self.dropout_module = FairseqDropout(dropout, module_name=type(self).__name__)
        _warn_once(update_rule, feature_map, normalization)

        self._quant_noise = (q_noise, qn_block_size)
        self.get_incremental_state: Any  # from fairseq's decorator, as its setter
        self.set_incremental_state: Any
        self._get_full_incremental_state_key: Any
        key_width = num_heads * self.feature_map.key_dim
        self.q_proj = self._projection(embed_dim, key_width, bias)
        self.k_proj = self._projection(self.source_dim, key_width, bias)
        self.v_proj = self._projection(self.source_dim, embed_dim, bias)
        self.out_proj = self._projection(embed_dim, embed_dim, bias)

    def _projection(self, width_in: int, width_out: int, bias: bool) -> Any:
        return quant_noise(nn.Linear(width_in, width_out, bias=bias), *self._quant_noise)

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does."""
        # Smaller where one input is projected to all three, as if they were one matrix.
        gain = 1 / math.sqrt(2) if self.source_dim == self.embed_dim else 1.0
        for module in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(module.weight, gain=gain)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def _features(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps and normalises queries and keys, and gives all three a type with the range that they need."""
        q, k = self.feature_map(q, k, scales=self._scales)
        if "sum" in self.normalization:
            q = sum_normalize(q, eps=self.feature_map.sum_eps)
            k = sum_normalize(k, eps=self.feature_map.sum_eps)
        if v.dtype == torch.float16 and self.needs_float32_range:
            v = v.float()
        return q.to(v.dtype), k.to(v.dtype), v

    def _divide(self, out: Tensor, z_q: Tensor) -> Tensor:
        divisor = z_q + self.feature_map.sum_eps
        # Before the first key that is not padding there is nothing to read and nothing to divide by. Nor is there
        # where FAVOR+ of all keys has as good as vanished: gradients through the quotient would overflow.
        return out / divisor.masked_fill(divisor.abs() < SMALLEST_DIVISOR, 1)

    def _project_out(self, out: Tensor, query: Tensor) -> Tensor:
        """(batch, time, heads, head_dim), what was read -> (time, batch, embed_dim), the layer's output."""
        time, batch, _ = query.shape
        out = self.dropout_module(out.to(query.dtype) * self.scale)
        return self.out_proj(out.transpose(0, 1).reshape(time, batch, self.embed_dim))

    def _heads(self, x: Tensor, dim: int) -> Tensor:
        """(time, batch, heads * dim) -> (batch, time, heads, dim), without a copy."""
        time, batch, _ = x.shape
        return x.view(time, batch, self.num_heads, dim).transpose(0, 1)

    @property
    def state_key(self) -> str:
        """Under which an incremental state holds this module's; not the same in another process."""
        return self._get_full_incremental_state_key("memory")

    def _get_input_buffer(self, incremental_state: dict[str, Any] | None) -> dict[str, Tensor]:
        return self.get_incremental_state(incremental_state, "memory") or {}

    def _set_input_buffer(self, incremental_state: dict[str, Any], buffer: dict[str, Tensor]) -> None:
        self.set_incremental_state(incremental_state, "memory", buffer)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Splits the one matrix of queries, keys and values that attention had in fairseq until 2019."""
        for kind in ("weight", "bias"):
            joined = state_dict.pop(f"{name}.in_proj_{kind}", None)
            if joined is not None:
                for projection, part in zip(("q_proj", "k_proj", "v_proj"), joined.chunk(3), strict=True):
                    state_dict[f"{name}.{projection}.{kind}"] = part

    def settings(self) -> dict[str, Any]:
        """What tells this attention from another whose parameters have the same names and shapes, and their sizes."""
        return {
            "update rule": self.update_rule,
            "feature map": self.feature_map_name,
            "feature dim": self.feature_map.output_dim,
            "normalization": ",".join(sorted(self.normalization)) or "none",
            "read-out scale": self.scale,
        }

    def extra_repr(self) -> str:
        normalization = ",".join(sorted(self.normalization)) or "none"
        return f"update_rule={self.update_rule}, normalization={normalization}, heads={self.num_heads}"


def keeps_rows(new_order: Tensor, rows: int) -> bool:
    """Whether an order of rows is known to leave `rows` rows as they are, as mostly in greedy search.

    On a GPU it never is: to know it the CPU would have to wait, and the copy that it saves costs less there.
    """
    return (
        new_order.device.type == "cpu"
        and new_order.numel() == rows
        and torch.equal(new_order, torch.arange(rows, dtype=new_order.dtype))
    )


def _warn_once(update_rule: str, feature_map: str, normalization: frozenset[str]) -> None:
    reason = known_to_diverge(update_rule, feature_map, normalization)
    if reason is not None and reason not in _warned_of:
        _warned_of.add(reason)
        logger.warning("update rule %s with map %s: %s", update_rule, feature_map, reason)
