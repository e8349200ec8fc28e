"""Attention to slots that a small network of the input writes: ABC-MLP (Peng et al. 2022)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.bounded_memory_attention import BoundedMemoryAttention
from fairseq_fastweights.mixers.mixer import Option, State

LOG_OF_NOTHING = -1e30
"""For the log of 0: exp() of it is 0, and unlike infinity it has differences and gradients."""


class ABCMLP(BoundedMemoryAttention):
    """Bounded-memory attention whose controls are the exponential of a linear layer (Peng et al. 2022).

        alpha_t = exp(W_phi x_t),  z_t = alpha_1 + ... + alpha_t
        K_t = (alpha_1 k_1^T + ... + alpha_t k_t^T) / z_t = z_{t-1} / z_t K_{t-1} + alpha_t / z_t k_t^T

    for each slot by itself, and V_t in the same way: slots are averages of what was read, as in
    flash-linear-attention's `abc`. If position i were divided by z_i alone, and not again by later sums, then a slot
    could hardly be written after a long text. W_phi has no bias, which would cancel in the quotient. Mao 2022 compares
    with this mixer (Table 3: 2 x 32 slots).

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        dropout: of the attention weights.
        bias: whether the projections have biases.
        slots: number of slots of each head.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and what is allowed.

    Examples:
        >>> layer = ABCMLP(16, 2, slots=4)
        >>> text = torch.randn(9, 3, 16)  # (time, batch, embed_dim)
        >>> whole, _ = layer(text)
        >>> first, state = layer(text[:5])
        >>> rest, state = layer(text[5:], state)
        >>> torch.allclose(torch.cat([first, rest]), whole, atol=1e-5)
        True
    """

    options: ClassVar[dict[str, Option]] = {
        "slots": Option(int, 32, "number of slots for keys, and for values, in each head of ABC")
    }
    needs_positions = True

    def __init__(
        self, embed_dim: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True, slots: int = 32
    ) -> None:
        super().__init__(embed_dim, num_heads, slots=slots, dropout=dropout, bias=bias)
        self.control_proj = nn.Linear(embed_dim, num_heads * slots, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and W_phi as it draws its output projection."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.control_proj.weight)

    def _controls(self, x: Tensor, state: State | None, real: Tensor) -> tuple[Tensor, Tensor, Tensor, State]:
        # The sum is kept as its log, and phi = exp(logit - log of the sum) is an exponential of what is at most 0:
        # neither large logits nor long texts overflow it, and the first position's is 1 however small its logit.
        # In float32 a log near 100 would stop growing after some 100,000 positions, whose terms round to nothing.
        logits = self.control_proj(x).view(*x.shape[:2], self.num_heads, self.slots).transpose(0, 1).double()
        logits = logits.masked_fill(~real[:, :, None, None], LOG_OF_NOTHING)
        if state is None:
            before = logits.new_full((x.shape[1], self.num_heads, self.slots), LOG_OF_NOTHING)
        else:
            before = state["log_sum"].masked_fill(state["read"][:, None, None] == 0, LOG_OF_NOTHING)
        log_sum = torch.cat([before[:, None], logits], dim=1).logcumsumexp(dim=1)
        dtype = ops.state_dtype(x.dtype)
        phi = (logits - log_sum[:, 1:]).exp().to(dtype)
        log_kept = (log_sum[:, :-1] - log_sum[:, 1:]).to(dtype)
        # A copy: a state must not keep alive what it was taken from.
        return phi, phi, log_kept, {"log_sum": log_sum[:, -1].clone()}
