"""Attention as a fast weight memory: a drop-in replacement for fairseq's causal `MultiheadAttention`."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.feature_maps import build_feature_map, sum_normalize
from fairseq_fastweights.modules.segment_state import SegmentState
from fairseq_fastweights.modules.update_rules import (
    NORMALIZATIONS,
    UPDATE_RULES,
    Gate,
    known_to_diverge,
    lookup,
)

logger = logging.getLogger(__name__)

_warned_of: set[str] = set()


@with_incremental_state
class FastWeightAttention(nn.Module):
    """Causal self-attention whose memory is a matrix per head, written and read at every step.

    update rule x feature map x normalisation:

        q, k = phi(W_q x), phi(W_k x)            phi one of `feature_maps.FEATURE_MAPS`
        "sum":       q, k divided by the sums of their components (Schlag et al. 2021, Eq. 29)
        S_t from S_{t-1}, k_t, v_t and the gates by one of `UPDATE_RULES`;  y_t = S_t q_t
        "attention": y_t divided by z_t q_t, z_t = z_{t-1} + k_t with the rule's decays (Eq. 26, 28; Mao 2022, Eq. 5)
        "removal":   the value that the delta rule takes out divided by z_{t-1} k_t (Eq. 27)
        out = W_out (scale * y)

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`. Values have head_dim = embed_dim / num_heads numbers.
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
        backend: of `ops`.

    Raises:
        ValueError: naming the argument, what it was and what it may be.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        update_rule: str = "delta",
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
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must be a divisor of embed_dim, {embed_dim}")
        if backend not in ops.BACKENDS:
            raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(ops.BACKENDS)}")
        rule = lookup("update_rule", update_rule, UPDATE_RULES)
        normalization = rule.normalization if normalization is None else frozenset(normalization)
        if not normalization <= set(NORMALIZATIONS):
            raise ValueError(f"normalization is {sorted(normalization)}; it may hold {', '.join(NORMALIZATIONS)}")
        if "removal" in normalization and not rule.corrects:
            raise ValueError(f"normalization holds 'removal', but the {update_rule} rule removes nothing")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.update_rule = update_rule
        self.rule = rule
        self.normalization = normalization
        self.backend = backend
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
        # normalisation takes it back: float16 has not the range for them.
        self.needs_float32_range = bool(normalization & {"attention", "removal"}) or (
            feature_map == "favor" and "sum" not in normalization
        )
        self.scale = self.head_dim**-0.5 if scale_read_out else 1.0
        self.dropout_module = FairseqDropout(dropout, module_name=type(self).__name__)
        _warn_once(update_rule, feature_map, normalization)

        def projection(width_in: int, width_out: int, has_bias: bool = bias) -> Any:
            return quant_noise(nn.Linear(width_in, width_out, bias=has_bias), q_noise, qn_block_size)

        self.get_incremental_state: Any  # from fairseq's decorator, as its setter
        self.set_incremental_state: Any
        self.q_proj: Any
        self.k_proj: Any
        self.v_proj: Any
        self.out_proj: Any
        key_width = num_heads * self.feature_map.key_dim
        self.q_proj = projection(embed_dim, key_width)
        self.k_proj = projection(embed_dim, key_width)
        self.v_proj = projection(embed_dim, embed_dim)
        self.out_proj = projection(embed_dim, embed_dim)
        for gate in rule.gates:
            width = num_heads * self._gate_size(gate)
            self.add_module(f"{gate.name}_proj", projection(embed_dim, width, bias or gate.log))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and the biases of gates (`reset_gate_biases`)."""
        for module in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(module.weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        for gate in self.rule.gates:
            module = self._gate_projection(gate)
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        self.reset_gate_biases()

    def reset_gate_biases(self) -> None:
        """Draws the biases of the gates that decay the memory, so that its decays start uniformly spread."""
        for gate in self.rule.gates:
            if gate.log:
                units = self.num_heads if gate.per == "head" else self._gate_size(gate)
                uniform_gate_bias_(self._gate_projection(gate).bias, units)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Writes and reads the memory for every step of `query`.

        Args:
            query: (time, batch, embed_dim).
            key, value: None or `query` itself, as fairseq passes it.
            key_padding_mask: (batch, time), true where a position is padding: it neither writes nor decays the state.
            incremental_state: where given, the state that it holds is the one before the first step, and the state
                after the last step is put there. One token or a whole segment: it is the same.
            need_weights, attn_mask: taken for fairseq's sake. There are no weights to return, and no step can read
                what a later one writes.

        Returns:
            (time, batch, embed_dim), and None for the attention weights.
        """
        if (key is not None and key is not query) or (value is not None and value is not query):
            raise ValueError("key and value must be None or query itself: this is self-attention")
        time, batch, _ = query.shape
        q = self._heads(self.q_proj(query), self.feature_map.key_dim)
        k = self._heads(self.k_proj(query), self.feature_map.key_dim)
        v = self._heads(self.v_proj(query), self.head_dim)
        gates = [self._gate(gate, query) for gate in self.rule.gates]

        q, k = self.feature_map(q, k)
        if "sum" in self.normalization:
            q = sum_normalize(q, eps=self.feature_map.sum_eps)
            k = sum_normalize(k, eps=self.feature_map.sum_eps)
        if v.dtype == torch.float16 and self.needs_float32_range:
            v = v.float()
        q, k = q.to(v.dtype), k.to(v.dtype)
        if key_padding_mask is not None:
            padding = key_padding_mask.to(torch.bool)[:, :, None, None]
            k = k.masked_fill(padding, 0)
            gates = [g.masked_fill(padding.view(batch, time, *[1] * (g.dim() - 2)), 0) for g in gates]

        state = self._get_input_buffer(incremental_state).get("state")
        # A segment may be computed twice from the same state; the state of a text that is being written is read once.
        in_place = state is not None and not torch.is_grad_enabled() and not isinstance(incremental_state, SegmentState)
        out, state = self._recall(q, k, v, gates, state, in_place)
        if incremental_state is not None:
            self._set_input_buffer(incremental_state, {"state": state})
        out = self.dropout_module(out.to(query.dtype) * self.scale)
        return self.out_proj(out.transpose(0, 1).reshape(time, batch, self.embed_dim)), None

    def _recall(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], state: Tensor | None, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Runs the rule; with attention normalisation the state's last value column holds the normaliser z."""
        how: dict[str, Any] = {"in_place": in_place, "backend": self.backend}
        if not self.normalization & {"attention", "removal"}:
            return self.rule.operation(q, k, v, *gates, initial_state=state, **how)
        ones = v.new_ones(*v.shape[:3], 1)
        if not self.rule.corrects:
            gates = [
                F.pad(g, (0, 1)) if gate.per == "value" else g for g, gate in zip(gates, self.rule.gates, strict=True)
            ]
            both, state = self.rule.operation(q, k, torch.cat([v, ones], dim=-1), *gates, initial_state=state, **how)
            out, z_q = both.split([self.head_dim, 1], dim=-1)
            return self._divide(out, z_q), state

        memory, z = (None, None) if state is None else state.split([self.head_dim, 1], dim=-1)
        k_written, v_written = k, v
        if "removal" in self.normalization:
            # S += beta (v - S k / d) k^T is the delta rule with keys k / sqrt(d) and values v sqrt(d); d = z_{t-1} k_t.
            # Where d vanishes nothing has been stored under k, and any finite divisor will do.
            k_before = F.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1]
            d, _ = ops.sum_rule(k, k_before, ones, initial_state=z, backend=self.backend)
            root = torch.where(d > self.feature_map.sum_eps, d, torch.ones_like(d)).sqrt()
            k_written, v_written = k / root, v * root
        z_q, z = ops.sum_rule(q, k, ones, initial_state=z, **how)
        out, memory = self.rule.operation(q, k_written, v_written, *gates, initial_state=memory, **how)
        if "attention" in self.normalization:
            out = self._divide(out, z_q)
        if state is None or not in_place:
            state = torch.cat([memory, z], dim=-1)
        return out, state

    def _divide(self, out: Tensor, z_q: Tensor) -> Tensor:
        divisor = z_q + self.feature_map.sum_eps
        # Before the first key that is not padding there is nothing to read and nothing to divide by.
        return out / divisor.masked_fill(divisor == 0, 1)

    def _gate(self, gate: Gate, x: Tensor) -> Tensor:
        logits = self._gate_projection(gate)(x)
        logits = logits.to(ops.state_dtype(logits.dtype))
        value = F.logsigmoid(logits) if gate.log else logits.sigmoid()
        if gate.per == "head":
            return value.transpose(0, 1)
        return self._heads(value, self._gate_size(gate))

    def _gate_size(self, gate: Gate) -> int:
        return {"head": 1, "key": self.feature_map.output_dim, "value": self.head_dim}[gate.per]

    def _gate_projection(self, gate: Gate) -> Any:
        return getattr(self, f"{gate.name}_proj")

    def _heads(self, x: Tensor, dim: int) -> Tensor:
        """(time, batch, heads * dim) -> (batch, time, heads, dim), without a copy."""
        time, batch, _ = x.shape
        return x.view(time, batch, self.num_heads, dim).transpose(0, 1)

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> dict[str, Any]:
        """Takes the rows `new_order` of the state, as beam search asks for."""
        buffer = self._get_input_buffer(incremental_state)
        if buffer:
            reordered = {name: x.index_select(0, new_order) for name, x in buffer.items()}
            self._set_input_buffer(incremental_state, reordered)
        return incremental_state

    def _get_input_buffer(self, incremental_state: dict[str, Any] | None) -> dict[str, Tensor]:
        return self.get_incremental_state(incremental_state, "memory") or {}

    def _set_input_buffer(self, incremental_state: dict[str, Any], buffer: dict[str, Tensor]) -> None:
        self.set_incremental_state(incremental_state, "memory", buffer)

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


def uniform_gate_bias_(bias: Tensor, units: int) -> None:
    """Fills `bias` so that its sigmoid is uniform over [1/n, 1 - 1/n], n = units (Gu et al. 2020)."""
    margin = 1 / max(units, 2)
    with torch.no_grad():
        bias.copy_(torch.logit(torch.empty_like(bias).uniform_(margin, 1 - margin)))


def _warn_once(update_rule: str, feature_map: str, normalization: frozenset[str]) -> None:
    reason = known_to_diverge(update_rule, feature_map, normalization)
    if reason is not None and reason not in _warned_of:
        _warned_of.add(reason)
        logger.warning("update rule %s with map %s: %s", update_rule, feature_map, reason)
