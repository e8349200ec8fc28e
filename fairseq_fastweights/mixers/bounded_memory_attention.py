"""Softmax attention to a fixed number of slots, into which keys and values are written: ABC-MLP and Linformer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.mixers.mixer import State, are_plain, option, project
from fairseq_fastweights.mixers.softmax_attention import SoftmaxMixer

LOG_OF_NOTHING = -1e30
"""For the log of 0: exp() of it is 0, and unlike infinity it has differences and gradients."""


class BoundedMemoryAttention(SoftmaxMixer):
    """Causal attention with bounded-memory control (ABC; Peng et al. 2022).

        K_t = Diag(g_t) K_{t-1} + phi_t k_t^T,  V_t = Diag(g_t) V_{t-1} + psi_t v_t^T
        out = W_out V_t^T softmax(K_t q_t / sqrt(head_dim))

    K and V have a row for each of n slots, (n, head_dim). The subclasses `ABCMLP` and `Linformer` compute the controls
    phi_t and psi_t, the share of a position that each slot takes, and g_t, the share of its content that a slot keeps;
    without g_t it keeps all. Padding writes nothing and takes no position.

    The state holds "keys", (batch, heads, head_dim, slots), "values", (batch, heads, slots, head_dim), "read",
    (batch,), the number of positions so far, and the state of the controls.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        slots: n, the number of slots of each head.
        dropout: of the attention weights.
        bias: whether the projections have biases.
        batch_first: as in `Mixer`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.
    """

    slots: int

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **self.take_options(options))

    def _controls(self, x: Tensor, state: State | None, real: Tensor) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """Computes the controls.

        Args:
            x: (time, batch, embed_dim).
            state: the state before it; None at the beginning of a text.
            real: (batch, time), false at padding, for which the controls are not used.

        Returns:
            phi, psi and log g, (batch, time, heads, slots), None for a g of 1, and the controls' part of the state
            after the last step.
        """
        raise NotImplementedError

    def mix(
        self, x: Tensor, state: State | None, padding: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        time, batch, _ = x.shape
        # q, k, v: (batch, time, heads, head_dim)
        q, k, v = (
            part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1)
            for part in project(x, [self.q_proj, self.k_proj, self.v_proj])
        )
        real = x.new_ones(batch, time, dtype=torch.bool) if padding is None else ~padding
        phi, psi, log_kept, after = self._controls(x, state, real)
        if padding is not None:
            phi, psi = (control.masked_fill(padding[:, :, None, None], 0) for control in (phi, psi))
        keys, values = (None, None) if state is None else (state["keys"], state["values"])
        q, phi, psi = q * self.head_dim**-0.5, phi.to(v.dtype), psi.to(v.dtype)
        # The decay rule twice. K_t q_t: values phi_t are written under k_t and read with q_t.
        scores, keys = ops.RULES["decay"].for_layer(q, k, phi, None, log_kept, initial_state=keys, in_place=in_place)
        weights = self.dropout_module(scores.softmax(dim=-1, dtype=ops.state_dtype(v.dtype))).to(v.dtype)
        # V_t^T softmax(...): values v_t are written under psi_t and read with the weights.
        out, values = ops.RULES["decay"].for_layer(
            weights, psi, v, log_kept, None, initial_state=values, in_place=in_place
        )
        read = real.sum(dim=1) if state is None else state["read"] + real.sum(dim=1)
        out = self.out_proj(self._join_heads(out.to(x.dtype).transpose(1, 2)))
        return out, {"keys": keys, "values": values, "read": read, **after}

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, slots={self.slots}"


class ABCMLP(BoundedMemoryAttention):
    """Bounded-memory attention whose controls are the exponential of a linear layer (Peng et al. 2022).

        alpha_t = exp(W_phi x_t),  z_t = alpha_1 + ... + alpha_t
        K_t = (alpha_1 k_1^T + ... + alpha_t k_t^T) / z_t = z_{t-1} / z_t K_{t-1} + alpha_t / z_t k_t^T

    for each slot by itself, and V_t in the same way: slots are averages of keys and of values, as in
    flash-linear-attention's `abc`. If position i were divided by z_i alone, and not again by later sums, then a slot
    could hardly be written after a long text. W_phi has no bias, which would cancel in the quotient. Mao 2022 compares
    with this mixer (Table 3: 2 x 32 slots).

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        slots: number of slots of each head.
        **others: `dropout`, `bias` and `batch_first`, as in `BoundedMemoryAttention`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = ABCMLP(16, 2, slots=4)(torch.randn(7, 3, 16))  # (time, batch, embed_dim)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'keys': (3, 2, 8, 4), 'values': (3, 2, 4, 8), 'read': (3,), 'log_sum': (3, 2, 4)}
    """

    slots: int = option(32, "number of slots for keys, and for values, in each head of ABC", least=1)

    needs_positions = True

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.control_proj = nn.Linear(embed_dim, num_heads * self.slots, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and W_phi as it draws its output projection."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.control_proj.weight)

    def _controls(self, x: Tensor, state: State | None, real: Tensor) -> tuple[Tensor, Tensor, Tensor, State]:
        # The sum is kept as its log, and phi = exp(logit - log of the sum) is an exponential of at most 0: neither
        # large logits nor long texts overflow it, and the first position's is 1 however small its logit.
        # In float32 a log near 100 would stop growing after some 100,000 positions, whose terms round to nothing.
        logits = self.control_proj(x).view(*x.shape[:2], self.num_heads, self.slots).transpose(0, 1).double()
        logits = logits.masked_fill(~real[:, :, None, None], LOG_OF_NOTHING)
        if state is None:
            before = logits.new_full((x.shape[1], self.num_heads, self.slots), LOG_OF_NOTHING)
        else:
            before = state["log_sum"].masked_fill(state["read"][:, None, None] == 0, LOG_OF_NOTHING)
        log_sum = torch.cat([before[:, None], logits], dim=1).logcumsumexp(dim=1)  # log z_0 ... log z_time
        dtype = ops.state_dtype(x.dtype)
        phi = (logits - log_sum[:, 1:]).exp().to(dtype)  # alpha_t / z_t
        log_kept = (log_sum[:, :-1] - log_sum[:, 1:]).to(dtype)  # log(z_{t-1} / z_t)
        # A copy: a state must not keep alive the tensor of the whole text.
        return phi, phi, log_kept, {"log_sum": log_sum[:, -1].clone()}


class Linformer(BoundedMemoryAttention):
    """Causal Linformer: bounded-memory attention whose controls are learned for each position.

        phi_t, psi_t = the columns t of E and F, both slots x max_positions

    Linformer (Wang et al. 2020) projects all keys of a text to E K and all values to F V. Each slot then mixes all
    positions of the text, so that it cannot be used in a decoder. This is the causal form of Peng et al. 2022, whose
    numbers Mao 2022 quotes (Table 3: 2 x 64 slots): position t reads the sums up to itself, E[:, :t] K[:t] and
    F[:, :t] V[:t]. The last position of a text of `max_positions` reads the same in both. All heads share E and F.
    No text can be longer than E and F have columns.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        max_positions: the largest number of positions of a text.
        slots: number of slots of each head.
        **others: `dropout`, `bias` and `batch_first`, as in `BoundedMemoryAttention`; E and F have no biases.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = Linformer(16, 2, max_positions=9, slots=4)(torch.randn(7, 3, 16))  # (time, batch, embed_dim)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'keys': (3, 2, 8, 4), 'values': (3, 2, 4, 8), 'read': (3,)}
    """

    slots: int = option(64, "number of slots for keys, and for values, in each head of Linformer", least=1)

    carries = False
    bounded = True

    def __init__(self, embed_dim: int, num_heads: int, *, max_positions: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        check_number("max_positions", max_positions, 1, whole=True)
        self.max_positions = max_positions
        # Layers, as in fairseq's Linformer, for their names' sake and for functions that draw all layers' weights anew.
        self.compress_k = nn.Linear(max_positions, self.slots, bias=False)
        self.compress_v = nn.Linear(max_positions, self.slots, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and E and F as it draws those of keys and values."""
        super().reset_parameters()
        for module in (self.compress_k, self.compress_v):
            nn.init.xavier_uniform_(module.weight, gain=1 / math.sqrt(2))

    def _controls(self, x: Tensor, state: State | None, real: Tensor) -> tuple[Tensor, Tensor, None, State]:
        time, batch, _ = x.shape
        positions = real.cumsum(dim=1)
        if state is not None:
            positions = positions + state["read"][:, None]
        # The CPU waits for a GPU, to say that a text is too long, only where it may be. On meta there are no numbers.
        if (
            (state is not None or time > self.max_positions)
            and not x.is_meta
            and (end := max(positions[:, -1:].flatten().tolist(), default=0)) > self.max_positions
        ):
            raise InvalidInput(f"x ends at position {end} of a text; max_positions is {self.max_positions}")
        # Padding before a text has no position; it takes the first one's control, and the slots take nothing of it.
        columns = (positions - 1).clamp(min=0)
        modules = [self.compress_k, self.compress_v]
        if are_plain(modules):
            tables = [module.weight.t() for module in modules]
        else:  # an adapter's layer maps a unit vector of a position to that position's column
            tables = [module(torch.eye(self.max_positions, dtype=x.dtype, device=x.device)) for module in modules]
        phi, psi = (
            F.embedding(columns, table)[:, :, None].expand(batch, time, self.num_heads, self.slots) for table in tables
        )
        return phi, psi, None, {}
