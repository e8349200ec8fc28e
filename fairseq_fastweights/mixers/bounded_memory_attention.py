"""Softmax attention to a fixed number of slots, into which keys and values are written."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.invalid_input import check_number
from fairseq_fastweights.mixers.children import in_rows
from fairseq_fastweights.mixers.mixer import State
from fairseq_fastweights.mixers.projections import project
from fairseq_fastweights.mixers.softmax import SoftmaxMixer


class BoundedMemoryAttention(SoftmaxMixer):
    """Causal attention with bounded-memory control (ABC; Peng et al. 2022).

        K_t = Diag(g_t) K_{t-1} + phi_t k_t^T,  V_t = Diag(g_t) V_{t-1} + psi_t v_t^T
        out = W_out V_t^T softmax(K_t q_t / sqrt(head_dim))

    with n slots of keys and n of values, the rows of K and V, (n, head_dim). This is the decay rule twice: it writes
    phi_t under k_t and reads with q_t, which gives each slot's score; it writes v_t under psi_t and reads with the
    softmax of the scores. The subclasses `ABCMLP` and `Linformer` compute the controls phi_t and psi_t, the share of a
    position that each slot takes, and g_t, what a slot keeps of what it has; without g_t it keeps all.

    Padding writes nothing and takes no position.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        slots: n, the number of slots of each head.
        dropout: of the attention weights.
        bias: whether the projections have biases.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and what is allowed.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, slots: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout, bias=bias)
        check_number("slots", slots, 1, whole=True)
        self.slots = slots

    def _controls(self, x: Tensor, state: State | None, real: Tensor) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """Computes the controls, the share of each position that each slot takes, and what slots keep.

        Args:
            x: (time, batch, embed_dim).
            state: the state before it; None at the beginning of a text.
            real: (batch, time), false at padding, for which the controls are not used.

        Returns:
            phi, psi and log g, (batch, time, heads, slots), None for a g of 1, and what the state after the last step
            holds for them.
        """
        raise NotImplementedError

    def forward(
        self, x: Tensor, state: State | None = None, padding: Tensor | None = None, *, overwrite: bool = False
    ) -> tuple[Tensor, State]:
        """Writes and reads the slots for every step; shapes and results are those of `Mixer.forward`.

        The state holds "keys", (batch, heads, head_dim, slots), "values", (batch, heads, slots, head_dim), "read",
        (batch,), the number of positions so far, and the state of the controls.
        """
        time, batch, _ = x.shape
        q, k, v = (
            part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1)
            for part in project(x, [self.q_proj, self.k_proj, self.v_proj])
        )
        real = x.new_ones(batch, time, dtype=torch.bool) if padding is None else ~padding
        phi, psi, log_kept, after = self._controls(x, state, real)
        if padding is not None:
            phi, psi = (control.masked_fill(padding[:, :, None, None], 0) for control in (phi, psi))

        keys, values = (None, None) if state is None else (state["keys"], state["values"])
        in_place = overwrite and state is not None and not torch.is_grad_enabled()
        q, phi, psi = q * self.head_dim**-0.5, phi.to(v.dtype), psi.to(v.dtype)
        scores, keys = ops.decay_rule(q, k, phi, None, log_kept, initial_state=keys, in_place=in_place)
        weights = self.dropout_module(scores.softmax(dim=-1, dtype=ops.state_dtype(v.dtype))).to(v.dtype)
        out, values = ops.decay_rule(weights, psi, v, log_kept, None, initial_state=values, in_place=in_place)
        out = self.out_proj(in_rows(out.to(x.dtype).transpose(0, 1).reshape(time, batch, self.embed_dim)))
        read = real.sum(dim=1) if state is None else state["read"] + real.sum(dim=1)
        return out, {"keys": keys, "values": values, "read": read, **after}

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, slots={self.slots}"
