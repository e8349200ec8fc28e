"""Linear attention with an update rule of `ops`, in place of a Transformer's causal self-attention."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.feature_maps import ReluMap
from fairseq_fastweights.mixers.linear_attention import LinearAttention
from fairseq_fastweights.mixers.mixer import State, are_plain, project
from fairseq_fastweights.mixers.projections import reset_linear
from fairseq_fastweights.mixers.update_rules import (
    UPDATE_RULES,
    check_normalization,
    known_to_diverge,
    known_to_fail_when_carried,
    known_to_lose_when_carried,
    lookup,
)
from fairseq_fastweights.ops import Gate, kernels
from fairseq_fastweights.ops.elementwise import apply_gate

logger = logging.getLogger(__name__)


class FastWeightAttention(LinearAttention):
    """Causal linear attention: its state is a matrix per head, written and read at every step.

    Update rule, feature map and normalisation can be combined freely:

        q, k = phi(W_q x), phi(W_k x)            phi one of `feature_maps.FEATURE_MAPS`
        "sum":       q, k divided by the sums of their components (Schlag et al. 2021, Eq. 29)
        S_t from S_{t-1}, k_t, v_t and the gates by one of `UPDATE_RULES`;  y_t = S_t q_t
        "attention": y_t divided by z_t q_t, z_t = z_{t-1} + k_t with the rule's decays (Eq. 26, 28; Mao 2022, Eq. 5)
        "removal":   the value that the delta rule removes divided by z_{t-1} k_t (Eq. 27)
        out = W_out (scale * y)

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim` unless `head_dim` is given.
        update_rule: a key of `UPDATE_RULES`.
        feature_map: a key of `feature_maps.FEATURE_MAPS`; None for that of the rule's paper.
        normalization: a set of some of "sum", "attention" and "removal"; None for that of the rule's paper.
        bias: whether the projections have biases. Those of gates that decay the state always have.
        **options: the other arguments of `LinearAttention`, but for `source_dim`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> layer, text = FastWeightAttention(16, 2, update_rule="delta"), torch.randn(9, 3, 16)
        >>> first, state = layer(text[:5])  # (time, batch, embed_dim)
        >>> rest, state = layer(text[5:], state)
        >>> torch.allclose(torch.cat([first, rest]), layer(text)[0], atol=1e-5)
        True
    """

    takes_attention = True
    takes_starts = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        update_rule: str = "delta",
        feature_map: str | None = None,
        normalization: frozenset[str] | None = None,
        bias: bool = True,
        **options: Any,
    ) -> None:
        rule = lookup("update_rule", update_rule, UPDATE_RULES)
        normalization = rule.normalization if normalization is None else frozenset(normalization)
        check_normalization(normalization, update_rule)
        feature_map = feature_map or rule.feature_map or "identity"
        super().__init__(
            embed_dim, num_heads, feature_map=feature_map, normalization=normalization, bias=bias, **options
        )
        if reason := known_to_diverge(update_rule, feature_map, normalization):
            _warn_once(f"update rule {update_rule} with {feature_map}: {reason}")
        self.update_rule = update_rule
        self.rule = rule
        self.takes_starts = rule.takes_starts
        self._gate_names = [gate.projection for gate in rule.gates]
        for gate in rule.gates:
            width = num_heads * self._gate_size(gate)
            self.add_module(gate.projection, nn.Linear(embed_dim, width, bias=bias or gate.log))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and the biases of gates (`reset_special_parameters`)."""
        super().reset_parameters()
        for gate in self.rule.gates:
            reset_linear(self._gate_projection(gate))
        self.reset_special_parameters()

    def reset_special_parameters(self) -> None:
        """Draws the biases of the gates that decay the state, so that its decays start uniformly spread."""
        for gate in self.rule.gates:
            if gate.log:
                units = self.num_heads if gate.per == "head" else self._gate_size(gate)
                uniform_gate_bias_(self._gate_projection(gate).bias, units)

    def mix(
        self, x: Tensor, state: State | None, padding: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        time, batch, _ = x.shape
        modules = [getattr(self, name) for name in self._gate_names]
        if time == 1 and state is not None and padding is None and starts is None and self._may_take_step(x):
            return self._step(x, modules, kernels.own_state(state["state"], in_place))
        # (batch, time, heads, dim)
        q, k, v, logits = self._inputs(x, *modules)
        gates = [self._gate(*pair) for pair in zip(self.rule.gates, logits, strict=True)]
        if padding is not None:
            # Padding leaves the state as it is: a key of 0 writes nothing, a log decay of 0 decays nothing.
            k = k.masked_fill(padding[:, :, None, None], 0)
            gates = [g.masked_fill(padding.view(batch, time, *[1] * (g.dim() - 2)), 0) for g in gates]

        before = None if state is None else state["state"]
        out, after = self._recall(q, k, v, gates, before, starts, in_place)
        return self._project_out(out, x), {"state": after}

    def _may_take_step(self, x: Tensor) -> bool:
        learned = self.normalization == {"sum"} and are_plain([self.feature_map], ReluMap)
        return learned and self.update_rule == "delta" and kernels.takes_step(self.backend, x)

    def _step(self, x: Tensor, gates: list[Any], state: Tensor) -> tuple[Tensor, State]:
        """A step of the delta rule as one operator behind its projections; it changes `state`."""
        *heads, beta = project(x, [self.q_proj, self.k_proj, self.v_proj, *gates])
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for part in heads)
        phi: Any = self.feature_map
        parameters = phi.weight.contiguous(), phi.bias.contiguous()
        out = kernels.delta_step_(self.q_norm(q), self.k_norm(k), v, beta, *parameters, phi.sum_eps, state)
        return self._project_out(out, x), {"state": state}

    def _recall(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: list[Tensor],
        state: Tensor | None,
        starts: Tensor | None,
        in_place: bool,
    ) -> tuple[Tensor, Tensor]:
        """Runs the rule; with attention normalisation the state's last value column holds the normaliser z."""
        how: dict[str, Any] = {"backend": self.backend} | ({} if starts is None else {"starts": starts})
        if not self.normalization & {"attention", "removal"}:
            return self.rule.for_layer(q, k, v, *gates, initial_state=state, in_place=in_place, **how)
        # z_t q_t is the output for values of 1, (batch, time, heads, 1).
        ones = v.new_ones(*v.shape[:3], 1)
        if not self.rule.corrects:
            # Ones beside the values: one state holds S and, as its last column, z, which no value decay reaches.
            gates = [
                F.pad(g, (0, 1)) if gate.per == "value" else g for g, gate in zip(gates, self.rule.gates, strict=True)
            ]
            v = torch.cat([v, ones], dim=-1)
            both, state = self.rule.for_layer(q, k, v, *gates, initial_state=state, in_place=in_place, **how)
            out, z_q = both.split([self.head_dim, 1], dim=-1)
            return self._divide(out, z_q), state

        # A correction v_t - S k_t would make that column no sum of keys: z is a state of its own, by a rule that adds.
        memory, z = (None, None) if state is None else state.split([self.head_dim, 1], dim=-1)
        k_written, v_written = k, v
        log_decay = self._log_key_decay(k, gates)
        if "removal" in self.normalization:
            # S += beta (v - S k / d) k^T is the delta rule with keys k / sqrt(d) and values v sqrt(d); d = z_{t-1} k_t,
            # decayed as S is. Where d vanishes nothing has been stored under k, and any finite divisor will do.
            k_before = F.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1]
            if log_decay is not None:
                k_before = k_before * log_decay.exp().to(k.dtype)
            if starts is not None:
                k_before = k_before.masked_fill(starts[..., None, None], 0)
            d, _ = self._normaliser(k, k_before, ones, log_decay, z, **how)
            root = torch.where(d > self.feature_map.sum_eps, d, torch.ones_like(d)).sqrt()
            k_written, v_written = k / root, v * root
        z_q, z = self._normaliser(q, k, ones, log_decay, z, in_place=in_place, **how)
        out, memory = self.rule.for_layer(
            q, k_written, v_written, *gates, initial_state=memory, in_place=in_place, **how
        )
        if "attention" in self.normalization:
            out = self._divide(out, z_q)
        if state is None or not in_place:
            state = torch.cat([memory, z], dim=-1)
        return out, state

    def _log_key_decay(self, k: Tensor, gates: list[Tensor]) -> Tensor | None:
        """The logarithm of all decays of keys together, of the shape of `k`; None if there are none."""
        # The log of a product of decays; decays of a whole head count for each of its keys.
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
            return ops.RULES["sum"].for_layer(q, k, ones, initial_state=z, **how)
        return ops.RULES["decay"].for_layer(q, k, ones, log_decay, None, initial_state=z, **how)

    def _gate(self, gate: Gate, logits: Tensor) -> Tensor:
        # log f = log sigmoid(W x) for decays, beta = sigmoid(W x).
        value = apply_gate(logits, "log_sigmoid" if gate.log else "sigmoid", backend=self.backend)
        if gate.per == "head":
            return value.transpose(0, 1)
        return self._heads(value, self._gate_size(gate))

    def _gate_size(self, gate: Gate) -> int:
        return {"head": 1, "key": self.feature_map.output_dim, "value": self.head_dim}[gate.per]

    def _gate_projection(self, gate: Gate) -> Any:
        return getattr(self, gate.projection)

    def concern_when_carried(self) -> str | None:
        """Returns a reason not to carry states from segment to segment in training, or None."""
        return (
            known_to_fail_when_carried(self.update_rule, self.normalization)
            or super().concern_when_carried()
            or known_to_lose_when_carried(self.update_rule)
        )

    def extra_repr(self) -> str:
        return f"update_rule={self.update_rule}, {super().extra_repr()}"


@cache
def _warn_once(text: str) -> None:
    """Logs a warning, once in a process: a model has many layers."""
    logger.warning(text)


def uniform_gate_bias_(bias: Tensor, units: int) -> None:
    """Fills `bias` so that its sigmoid is uniform over [1/n, 1 - 1/n], n = units (Gu et al. 2020)."""
    margin = 1 / max(units, 2)
    with torch.no_grad():
        bias.copy_(torch.logit(torch.empty_like(bias).uniform_(margin, 1 - margin)))
