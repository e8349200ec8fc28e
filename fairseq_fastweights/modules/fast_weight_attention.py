"""Attention as a fast weight memory: a drop-in replacement for fairseq's causal `MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.modules.memory_attention import MemoryAttention, keeps_rows
from fairseq_fastweights.modules.rotary_embedding import rotate, turns
from fairseq_fastweights.modules.segment_state import SegmentState
from fairseq_fastweights.modules.update_rules import Gate

ROTARY_BASE = 10000.0
"""Of rules that turn queries and keys by their positions: all dimensions of each head (Sun et al. 2023, Sec. 2.1)."""

GROUP_NORM_EPS = 1e-5
"""Added to the variance of what a head reads where that is normalised; torch's default, as the paper gives none."""


class FastWeightAttention(MemoryAttention):
    """Causal self-attention whose memory is a matrix per head, written and read at every step.

    update rule x feature map x normalisation:

        q, k = phi(W_q x), phi(W_k x)            phi one of `feature_maps.FEATURE_MAPS`
        "sum":       q, k divided by the sums of their components (Schlag et al. 2021, Eq. 29)
        S_t from S_{t-1}, k_t, v_t and the gates by one of `UPDATE_RULES`;  y_t = S_t q_t
        "attention": y_t divided by z_t q_t, z_t = z_{t-1} + k_t with the rule's decays (Eq. 26, 28; Mao 2022, Eq. 5)
        "removal":   the value that the delta rule takes out divided by z_{t-1} k_t (Eq. 27)
        out = W_out (scale * y)

    Retention (Sun et al. 2023, Eq. 6 and 8) turns q and k by their positions besides (Su et al. 2021), and
        out = W_out (scale * swish(W_g x) * norm(y / sqrt(m))), norm to mean 0 and variance 1 in each head,
                                                                m the size of q and k

    Args:
        embed_dim, num_heads: width of the input and of the output, and how many heads share it.
        update_rule: a key of `UPDATE_RULES`.
        backend: of `ops`.
        options: as for `MemoryAttention`.

    Raises:
        ValueError: naming the argument, what it was and what it may be.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        update_rule: str = "delta",
        backend: str = "auto",
        bias: bool = True,
        **options: Any,
    ) -> None:
        if backend not in ops.BACKENDS:
            raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(ops.BACKENDS)}")
        super().__init__(embed_dim, num_heads, update_rule=update_rule, bias=bias, **options)
        self.backend = backend
        if self.rule.rotary and self.feature_map.output_dim % 2:
            raise ValueError(
                f"the feature map gives keys {self.feature_map.output_dim} dimensions; with the {update_rule} rule "
                "their number must be even: they are turned in pairs"
            )
        for gate in self.rule.learned_gates:
            width = num_heads * self._gate_size(gate)
            self.add_module(f"{gate.name}_proj", self._projection(embed_dim, width, bias or gate.log))
        self.g_proj = self._projection(embed_dim, embed_dim, bias) if self.rule.gated_read_out else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and the biases of gates (`reset_gate_biases`)."""
        super().reset_parameters()
        modules = [self._gate_projection(gate) for gate in self.rule.learned_gates]
        for module in modules if self.g_proj is None else [*modules, self.g_proj]:
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        self.reset_gate_biases()

    def reset_gate_biases(self) -> None:
        """Draws the biases of the gates that decay the memory, so that its decays start uniformly spread."""
        for gate in self.rule.learned_gates:
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
            key_padding_mask: (batch, time), true where a position is padding: it neither writes nor decays the state,
                and takes no position of its own.
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

        q, k, v = self._features(q, k, v)
        padding = None if key_padding_mask is None else key_padding_mask.to(torch.bool)
        saved = self._get_input_buffer(incremental_state)
        if self.rule.rotary:
            q, k = self._turn(q, k, padding, saved.get("position"))
        if padding is not None:
            k = k.masked_fill(padding[:, :, None, None], 0)
            gates = [g.masked_fill(padding.view(batch, time, *[1] * (g.dim() - 2)), 0) for g in gates]

        state = saved.get("state")
        # A segment may be computed twice from the same state; the state of a text that is being written is read once.
        in_place = state is not None and not torch.is_grad_enabled() and not isinstance(incremental_state, SegmentState)
        out, state = self._recall(q, k, v, gates, state, in_place)
        if incremental_state is not None:
            buffer = {"state": state}
            if self.rule.rotary:
                buffer["position"] = _positions_after(batch, time, padding, saved.get("position"), query.device)
            self._set_input_buffer(incremental_state, buffer)
        if self.g_proj is not None:
            # The norm of y / sqrt(m) is that of y with m times the epsilon: the division costs nothing.
            eps = GROUP_NORM_EPS * self.feature_map.output_dim
            out = F.layer_norm(out, (self.head_dim,), eps=eps) * self._heads(F.silu(self.g_proj(query)), self.head_dim)
        return self._project_out(out, query), None

    def _turn(self, q: Tensor, k: Tensor, padding: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Turns queries and keys by their positions; `before`, (batch,), says how many each row has read."""
        positions = torch.arange(q.shape[1], device=q.device)[None] if padding is None else (~padding).cumsum(dim=1) - 1
        if before is not None:
            positions = positions + before[:, None]
        # Texts that are carried over have millions of positions, which differ by less than float32 can tell.
        turned = turns(positions[..., None].double(), q.shape[-1], ROTARY_BASE, q.dtype)
        return rotate(q, *turned), rotate(k, *turned)

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
        log_decay = self._log_key_decay(k, gates)
        if "removal" in self.normalization:
            # S += beta (v - S k / d) k^T is the delta rule with keys k / sqrt(d) and values v sqrt(d); d = z_{t-1} k_t,
            # decayed as S is. Where d vanishes nothing has been stored under k, and any finite divisor will do.
            k_before = F.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1]
            if log_decay is not None:
                k_before = k_before * log_decay.exp().to(k.dtype)
            d, _ = self._normaliser(k, k_before, ones, log_decay, z, backend=self.backend)
            root = torch.where(d > self.feature_map.sum_eps, d, torch.ones_like(d)).sqrt()
            k_written, v_written = k / root, v * root
        z_q, z = self._normaliser(q, k, ones, log_decay, z, **how)
        out, memory = self.rule.operation(q, k_written, v_written, *gates, initial_state=memory, **how)
        if "attention" in self.normalization:
            out = self._divide(out, z_q)
        if state is None or not in_place:
            state = torch.cat([memory, z], dim=-1)
        return out, state

    def _log_key_decay(self, k: Tensor, gates: list[Tensor]) -> Tensor | None:
        """The logs of all decays of keys together, as `k` has dimensions; None if there are none."""
        logs = [
            g if gate.per == "key" else g[..., None].expand(k.shape)
            for g, gate in zip(gates, self.rule.gates, strict=True)
            if gate.log and gate.per != "value"
        ]
        return sum(logs[1:], logs[0]) if logs else None

    @staticmethod
    def _normaliser(
        q: Tensor, k: Tensor, ones: Tensor, log_decay: Tensor | None, z: Tensor | None, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """z_t q_t for every step, z_t = f_t z_{t-1} + k_t, and the last z."""
        if log_decay is None:
            return ops.sum_rule(q, k, ones, initial_state=z, **how)
        return ops.decay_rule(q, k, ones, log_decay, None, initial_state=z, **how)

    def _gate(self, gate: Gate, x: Tensor) -> Tensor:
        if gate.fixed is not None:
            time, batch, _ = x.shape
            return gate.fixed(self.num_heads, x.device, ops.state_dtype(x.dtype)).expand(batch, time, self.num_heads)
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

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> dict[str, Any]:
        """Takes the rows `new_order` of the state, as beam search asks for."""
        buffer = self._get_input_buffer(incremental_state)
        if buffer and not keeps_rows(new_order, buffer["state"].shape[0]):
            reordered = {name: x.index_select(0, new_order) for name, x in buffer.items()}
            self._set_input_buffer(incremental_state, reordered)
        return incremental_state


def _positions_after(
    batch: int, time: int, padding: Tensor | None, before: Tensor | None, device: torch.device
) -> Tensor:
    """(batch,), how many steps that are not padding each row has read."""
    read = torch.full((batch,), time, device=device) if padding is None else (~padding).sum(dim=1)
    return read if before is None else before + read


def uniform_gate_bias_(bias: Tensor, units: int) -> None:
    """Fills `bias` so that its sigmoid is uniform over [1/n, 1 - 1/n], n = units (Gu et al. 2020)."""
    margin = 1 / max(units, 2)
    with torch.no_grad():
        bias.copy_(torch.logit(torch.empty_like(bias).uniform_(margin, 1 - margin)))
