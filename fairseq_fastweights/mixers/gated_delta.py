"""Gated DeltaNet, Kimi delta attention, DeltaProduct and DeltaNet: delta rules behind a short convolution."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mamba import draw_step_biases_
from fairseq_fastweights.mixers.mixer import (
    KEY_SIZES,
    VALUE_SIZES,
    Mixer,
    State,
    are_plain,
    beyond,
    check_divisor,
    gated_norm,
    in_rows,
    option,
    project,
)
from fairseq_fastweights.mixers.projections import shared
from fairseq_fastweights.mixers.short_convolution import convolve
from fairseq_fastweights.mixers.update_rules import known_to_lose_when_carried
from fairseq_fastweights.ops import kernels
from fairseq_fastweights.ops.elementwise import apply_gate, apply_map

SMALLEST_RATE, LARGEST_RATE = 0.01, 16
"""The range of the initial exp(A_log), uniform; in Kimi delta attention it begins at 1, as in its authors' code."""


class GatedDelta(Mixer):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2025), in the form of OLMo-hybrid and Qwen3-Next.

        q, k, v = silu(conv([W_q x, W_k x, W_v x]))           the last `conv` inputs of each channel
        q = q / |q| / sqrt(key_dim),  k = k / |k|             in each head
        beta = sigmoid(W_b x)                                 a number for each head; twice that if negative_eigenvalues
        log f = -exp(A_log) softplus(W_a x + dt_bias)         a number for each head
        y = gated_delta_rule(q, k, v, beta, log f)            `ops.gated_delta_rule`
        out = W_o (w * y / rms(y) * silu(W_g x))              the norm in each head

    Parameters have the names and shapes of Hugging Face's `OlmoHybridGatedDeltaNet`. Each head of keys serves
    num_heads / key_heads successive heads of values. With `kv_heads` keys and values are those of grouped-query
    attention, and serve num_heads / kv_heads successive heads of queries, each with a state of its own. With
    `gate_rank` W_g is the product of two matrices.

    The state holds "conv", (batch, conv - 1, channels), the inputs that the convolution still needs, and "memory",
    (batch, num_heads, key_dim, value_dim), in float32 (float64 for inputs in float64).

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads of values.
        key_heads: number of heads of queries and keys, a divisor of `num_heads`; 0 for `num_heads`.
        key_dim: size of each head of keys; 0 for embed_dim / num_heads.
        value_dim: size of each head of values; 0 for embed_dim / num_heads.
        conv: width of the convolution, in inputs.
        negative_eigenvalues: whether betas reach 2; I - beta k k^T then has an eigenvalue of -1, and the state can
            count modulo 2 (Grazzi et al. 2025).
        eps: added under the root of the norm; Qwen3-Next has 1e-6.
        bias: whether the projections have biases, which those of the papers lack; decays have `dt_bias` in any case.
            With them a layer can take over an attention that has some, and start with an open output gate.
        kv_heads: number of heads of keys and values that heads of queries share, a divisor of `num_heads`; 0 for heads
            of keys as of queries, and of values as `num_heads`.
        gate_rank: rank of W_g, the projection of the output gate; 0 for a matrix of any rank.
        backend, batch_first: as in `Mixer`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> layer = GatedDelta(16, 4, key_heads=2, key_dim=8)
        >>> out, state = layer(torch.randn(7, 3, 16))
        >>> out.shape, state["memory"].shape
        (torch.Size([7, 3, 16]), torch.Size([3, 4, 8, 4]))
    """

    key_heads: int = option(0, "number of heads of queries and keys, a divisor of those of values; 0 is as many")
    key_dim: int = option(0, "dimension of each head's keys; 0 is the width divided by the heads", KEY_SIZES, 0)
    value_dim: int = option(0, "dimension of each head's values; 0 is the width divided by the heads", VALUE_SIZES, 0)
    conv: int = option(4, "width of the short convolution", least=1)
    negative_eigenvalues: bool = option(False, "let betas reach 2 (negative eigenvalues)")
    eps: float = option(1e-5, "epsilon of the output norm", least=0)
    bias: bool = option(False, "biases of the projections, with which layers start nearer to a trained attention")
    kv_heads: int = option(0, "number of heads of keys and values that those of queries share; 0 for none shared")
    gate_rank: int = option(0, "rank of the projection of the output gate; 0 for any", least=0)

    unrecorded = ("bias", "kv_heads", "gate_rank")
    takes_attention = True
    takes_starts = True
    padding_last = True
    writes = 1  # keys, values and betas for each token
    _smallest_rate: float = SMALLEST_RATE
    _output_activation = "silu"

    def __init__(self, embed_dim: int, num_heads: int = 1, **options: Any) -> None:
        others, bias, kv_heads = self.take_options(options), self.bias, self.kv_heads
        # With sizes of their own, heads need not divide the width.
        head_dim = self.value_dim if self.key_dim and self.value_dim else 0
        super().__init__(embed_dim, num_heads, head_dim, **others)
        for name in ("key_heads", "kv_heads"):
            check_divisor(name, getattr(self, name), "num_heads", num_heads, or_zero=True)
        if kv_heads and self.key_heads not in (0, num_heads):
            raise InvalidInput(f"key_heads is {self.key_heads}; with kv_heads it must be num_heads, {num_heads}, or 0")
        self.key_heads = self.key_heads or num_heads
        self.key_dim, self.value_dim = self.key_dim or self.head_dim, self.value_dim or self.head_dim
        values = num_heads * self.value_dim
        # Queries, keys and values side by side are the channels of one convolution.
        self._channels = [
            self.key_heads * self.key_dim,
            self.writes * (kv_heads or self.key_heads) * self.key_dim,
            self.writes * (kv_heads or num_heads) * self.value_dim,
        ]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, size, bias=bias) for size in self._channels)
        self.b_proj = nn.Linear(embed_dim, self.writes * num_heads, bias=bias)
        channels = sum(self._channels)
        self.conv1d = nn.Conv1d(channels, channels, self.conv, groups=channels, padding=self.conv - 1, bias=False)
        self._make_gates(values)
        self.o_norm = nn.RMSNorm(self.value_dim, self.eps)
        self.o_proj = nn.Linear(values, embed_dim, bias=bias)
        self.reset_special_parameters()

    def _make_gates(self, values: int) -> None:
        """Makes the parameters of the decays, and of the output gate of `values` numbers."""
        self.a_proj = nn.Linear(self.embed_dim, self.num_heads, bias=False)
        if self.gate_rank:
            self.g_a_proj = nn.Linear(self.embed_dim, self.gate_rank, bias=False)
            self.g_b_proj = nn.Linear(self.gate_rank, values, bias=self.bias)
        else:
            self.g_proj = nn.Linear(self.embed_dim, values, bias=self.bias)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))

    @torch.no_grad()
    def reset_special_parameters(self) -> None:
        """Draws the rates exp(A_log) uniformly up to `LARGEST_RATE` and the steps as in Mamba; sets the norm to 1."""
        self.o_norm.weight.fill_(1)
        # exp(A_log) is the rate of a decay, dt_bias the size of its step before softplus, as in Mamba.
        decays: Any = getattr(self, "forget_gate", self)
        rates = torch.empty_like(decays.A_log, dtype=torch.float32).uniform_(self._smallest_rate, LARGEST_RATE)
        decays.A_log.copy_(rates.log())
        draw_step_biases_(decays.dt_bias)

    def mix(
        self, text: Tensor, state: State | None, lengths: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        before = {} if state is None else state
        modules = [self.q_proj, self.k_proj, self.v_proj, self.b_proj, *self._gate_projections]
        projected, logits, *of_gates = project(text, modules, together=3)
        if state is not None and len(text) == 1 and lengths is None and starts is None and self._may_take_step(text):
            return self._step(projected, logits, of_gates, state, in_place)
        # silu(conv([W_q x, W_k x, W_v x])), (time, batch, channels)
        mixed, conv_state = convolve(
            self.conv1d, self.conv, projected, before.get("conv"), lengths, starts, backend=self.backend
        )
        # (batch, time, heads, dim)
        q, k, v = mixed.split(self._channels, -1)
        # q / |q| / sqrt(key_dim) and k / |k|, with 1e-6 added to the square, as in flash-linear-attention.
        unit = partial(apply_map, normalization="length", eps=1e-6, dtype=q.dtype, backend=self.backend)
        q = unit(_heads(q, self.key_heads), scale=self.key_dim**-0.5)
        k = unit(_heads(k, self.writes * (self.kv_heads or self.key_heads)))
        v = _heads(v, self.writes * (self.kv_heads or self.num_heads))
        if self.kv_heads:
            k, v = (shared(x, self.writes * self.num_heads, 2) for x in (k, v))
        most = 2.0 if self.negative_eigenvalues else 1.0
        beta = apply_gate(logits, "sigmoid", scale=most, backend=self.backend).transpose(0, 1)
        log_gate = self._log_gate(of_gates, beta)
        if lengths is not None:  # neither a write nor a decay: the state stays
            end = beyond(len(text), lengths).t()
            beta = beta.masked_fill(end[..., None], 0)
            log_gate = log_gate.masked_fill(end.view(*end.shape, *[1] * (log_gate.dim() - 2)), 0)
        how: dict[str, Any] = {"starts": starts, "in_place": in_place, "backend": self.backend}
        y, memory = self._run_rule(q, k, v, beta, log_gate, initial_state=before.get("memory"), **how)
        out = in_rows(self._gated_output(y.transpose(0, 1), of_gates, mixed.dtype))
        return self.o_proj(out), {"conv": conv_state, "memory": memory}

    def _may_take_step(self, text: Tensor) -> bool:
        if type(self) is not GatedDelta or not kernels.takes_step(self.backend, text):
            return False
        return are_plain([self.conv1d], nn.Conv1d) and are_plain([self.o_norm], nn.RMSNorm)

    def _step(
        self, projected: Tensor, logits: Tensor, of_gates: list[Tensor], state: State, in_place: bool
    ) -> tuple[Tensor, State]:
        """A decode step as one operator behind the projections."""
        after = {name: kernels.own_state(state[name], in_place) for name in ("conv", "memory")}
        gates = logits, of_gates[0], self._output_logits(of_gates[1])
        parameters = (x.contiguous() for x in (self.conv1d.weight, self.A_log, self.dt_bias, self.o_norm.weight))
        heads = self.key_heads, self.kv_heads or self.key_heads, self.kv_heads or self.num_heads
        most = 2.0 if self.negative_eigenvalues else 1.0
        out = kernels.gated_delta_step_(projected, *gates, *parameters, *heads, most, self.eps, *after.values())
        return self.o_proj(out), after

    def _run_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor]:
        return ops.RULES["gated-delta"].for_layer(q, k, v, beta, log_gate, **how)

    @property
    def _gate_projections(self) -> list[Any]:
        """The projections of the text for the decays and for the output gate."""
        return [self.a_proj, self.g_a_proj if self.gate_rank else self.g_proj]

    def _log_gate(self, projected: list[Tensor], beta: Tensor) -> Tensor:
        """log f, (batch, time, num_heads) as `beta` or (batch, time, num_heads, key_dim)."""
        log_gate = apply_gate(projected[0], "softplus", bias=self.dt_bias, log_rate=self.A_log, backend=self.backend)
        return log_gate.transpose(0, 1)

    def _gated_output(self, y: Tensor, projected: list[Tensor], dtype: torch.dtype) -> Tensor:
        """w * y / rms(y) * silu(W_g x) for y, (time, batch, num_heads, value_dim), with heads side by side."""
        logits = self._output_logits(projected[-1])
        how: dict[str, Any] = {"eps": self.eps, "dtype": dtype, "backend": self.backend}
        return gated_norm(self.o_norm, y, logits, self._output_activation, **how)

    def _output_logits(self, projected: Tensor) -> Tensor:
        """The logits of the output gate, (time, batch, num_heads * value_dim)."""
        logits: Tensor = self.g_b_proj(projected) if self.gate_rank else projected
        return logits


def _heads(x: Tensor, heads: int) -> Tensor:
    """(time, batch, channels) -> (batch, time, heads, dim)."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


class _ForgetGate(nn.Module):
    """The decays of `KimiDelta`."""

    def __init__(self, embed_dim: int, num_heads: int, key_dim: int, rank: int) -> None:
        super().__init__()
        self.f_a_proj = nn.Linear(embed_dim, rank, bias=False)
        self.f_b_proj = nn.Linear(rank, num_heads * key_dim, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(num_heads * key_dim))
        self.A_log = nn.Parameter(torch.empty(1, 1, num_heads, 1))

    def forward(self, low: Tensor, backend: str) -> Tensor:
        """The log decays, (..., num_heads, key_dim), for `low`, the output of `f_a_proj`."""
        rates = self.A_log.flatten()
        log_gate = apply_gate(self.f_b_proj(low), "softplus", bias=self.dt_bias, log_rate=rates, backend=backend)
        return log_gate.unflatten(-1, (len(rates), -1))


class KimiDelta(GatedDelta):
    """Kimi delta attention (Kimi Team 2025): Gated DeltaNet with a decay for each dimension of keys.

        log f = -exp(A_log) softplus(W_fb W_fa x + dt_bias)   a number for each key dimension of each head
        out = W_o (w * y / rms(y) * sigmoid(W_gb W_ga x))     W_fa x and W_ga x have value_dim numbers

    The other equations are those of `GatedDelta`. Parameters have the names and shapes of Hugging Face's
    `KimiLinearDeltaAttention`, in which heads of keys and of values are equal in number and size.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads of values.
        gate_bias: whether the second projection of the output gate has a bias, as in flash-linear-attention.
        **others: those of `GatedDelta`, but for `gate_rank`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = KimiDelta(16, 4)(torch.randn(7, 3, 16))
        >>> out.shape, state["memory"].shape
        (torch.Size([7, 3, 16]), torch.Size([3, 4, 4, 4]))
    """

    gate_bias: bool = option(False, "give the output gate a bias, as in flash-linear-attention")
    gate_rank = 0  # no option: the rank is `value_dim`

    _smallest_rate = 1
    _output_activation = "sigmoid"

    def _make_gates(self, values: int) -> None:
        # Both projections of gates go through value_dim numbers, as in the paper's layer.
        self.gate_rank = self.value_dim
        self.forget_gate = _ForgetGate(self.embed_dim, self.num_heads, self.key_dim, self.value_dim)
        self.g_a_proj = nn.Linear(self.embed_dim, self.value_dim, bias=False)
        self.g_b_proj = nn.Linear(self.value_dim, values, bias=self.bias or self.gate_bias)

    @property
    def _gate_projections(self) -> list[Any]:
        return [self.forget_gate.f_a_proj, self.g_a_proj]

    def _log_gate(self, projected: list[Tensor], beta: Tensor) -> Tensor:
        log_gate: Tensor = self.forget_gate(projected[0], self.backend)
        return log_gate.transpose(0, 1)


class DeltaProduct(GatedDelta):
    """DeltaProduct (Siems et al. 2025): several writes for each token, one after the other.

    A token has `writes` keys, values and betas, each a step of Gated DeltaNet. The state decays before the first step,
    and the query reads after the last, so that a token multiplies the state by a product of `writes` matrices
    I - beta k k^T. With `negative_eigenvalues`, which the paper's models have, such a matrix can be a reflection, and
    a product of two a rotation; without, each only shrinks the component along its key.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads of values.
        writes: keys, values and betas for each token.
        **others: those of `GatedDelta`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = DeltaProduct(16, 4, writes=3)(torch.randn(7, 3, 16))
        >>> out.shape, state["memory"].shape
        (torch.Size([7, 3, 16]), torch.Size([3, 4, 4, 4]))
    """

    writes: int = option(2, "number of writes per token", least=1)

    def _run_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor]:
        # n steps in the place of a token, whose projections lie side by side: the first decays, the last is read.
        n, starts = self.writes, how.pop("starts")
        k, v, beta = (x.unflatten(2, (n, -1)).flatten(1, 2) for x in (k, v, beta))
        q = F.pad(q[:, :, None], (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
        log_gate = F.pad(log_gate[:, :, None], (0, 0, 0, n - 1)).flatten(1, 2)
        starts = None if starts is None else F.pad(starts[:, :, None], (0, n - 1)).flatten(1)
        y, memory = super()._run_rule(q, k, v, beta, log_gate, starts=starts, **how)
        return y[:, n - 1 :: n], memory


class DeltaNet(GatedDelta):
    """DeltaNet as Yang et al. (2024) train it, in the form of flash-linear-attention: Gated DeltaNet without decays.

        y = delta_rule(q, k, v, beta)                         `ops.delta_rule`
        out = W_o (w * y / rms(y))                            times silu(W_g x) with `gate`; the norm in each head

    q, k, v and beta are those of `GatedDelta`, and so is the state. The layer of Schlag et al. (2021), with a feature
    map and sum normalisation, is `FastWeightAttention` with the rule "delta".

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads of values.
        gate: whether the output is gated.
        **others: those of `GatedDelta`, but for `bias` and `gate_rank`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = DeltaNet(16, 4)(torch.randn(7, 3, 16))
        >>> out.shape, state["memory"].shape
        (torch.Size([7, 3, 16]), torch.Size([3, 4, 4, 4]))
    """

    gate: bool = option(False, "gate the output, as Gated DeltaNet")
    bias, gate_rank = False, 0  # no options

    takes_attention = False

    def _make_gates(self, values: int) -> None:
        if self.gate:
            self.g_proj = nn.Linear(self.embed_dim, values, bias=self.bias)

    @torch.no_grad()
    def reset_special_parameters(self) -> None:
        """Sets the norm to 1."""
        self.o_norm.weight.fill_(1)

    @property
    def _gate_projections(self) -> list[Any]:
        return [self.g_proj] if self.gate else []

    def _log_gate(self, projected: list[Tensor], beta: Tensor) -> Tensor:
        # log f = 0: nothing is forgotten.
        return beta.new_zeros(()).expand(beta.shape)

    def concern_when_carried(self) -> str | None:
        """Returns a reason not to carry states from segment to segment in training."""
        return known_to_lose_when_carried("delta")

    def _run_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor]:
        if self.negative_eigenvalues:  # the delta rule takes no betas above 1
            return super()._run_rule(q, k, v, beta, log_gate, **how)
        return ops.RULES["delta"].for_layer(q, k, v, beta, **how)

    def _gated_output(self, y: Tensor, projected: list[Tensor], dtype: torch.dtype) -> Tensor:
        if self.gate:
            return super()._gated_output(y, projected, dtype)
        if are_plain([self.o_norm], nn.RMSNorm):
            precise = ops.state_dtype(y.dtype)
            y = F.rms_norm(y.to(precise), (self.value_dim,), self.o_norm.weight.to(precise), self.eps)
        else:
            y = self.o_norm(y)
        return y.flatten(-2).to(dtype)
