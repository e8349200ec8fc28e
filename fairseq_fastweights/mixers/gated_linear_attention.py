"""Gated linear attention: each key dimension of the state decays at a rate that the input sets (Yang et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.mixer import KEY_SIZES, VALUE_SIZES, Mixer, State, gated_norm, in_rows, option, project
from fairseq_fastweights.ops.elementwise import apply_gate

TEMPERATURE = 16
"""The root that is taken of the decays (tau in the paper): forgetting then begins slow."""


class GatedLinearAttention(Mixer):
    """Gated linear attention (Yang et al. 2024, Sec. 4.4), in the form of flash-linear-attention.

        q, k, v = W_q x / sqrt(key_dim), W_k x, W_v x
        log f = log(sigmoid(W_f2 W_f1 x + b)) / 16            a number for each key dimension of each head
        S_t = Diag(f_t) S_{t-1} + k_t v_t^T,  y_t = q_t S_t   `ops.decay_rule`
        out = W_o (w * y / rms(y) * silu(W_g x))              the norm in each head

    The state holds "state", (batch, num_heads, key_dim, value_dim), in float32 (float64 for inputs in float64).

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads.
        key_dim: size of each head of queries and keys; 0 for half of embed_dim / num_heads, as in the paper.
        value_dim: size of each head of values; 0 for embed_dim / num_heads.
        rank: of the projection W_f2 W_f1.
        eps: added under the root of the norm.
        backend, batch_first: as in `Mixer`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = GatedLinearAttention(16, 2)(torch.randn(7, 3, 16))
        >>> out.shape, state["state"].shape
        (torch.Size([7, 3, 16]), torch.Size([3, 2, 4, 8]))
    """

    key_dim: int = option(0, "dimension of each head's keys; 0 is half of the width divided by the heads", KEY_SIZES, 0)
    value_dim: int = option(0, "dimension of each head's values; 0 is the width divided by the heads", VALUE_SIZES, 0)
    rank: int = option(16, "rank of the projection to decays", least=1)
    eps: float = option(1e-5, "epsilon of the output norm", least=0)

    takes_starts = True

    def __init__(self, embed_dim: int, num_heads: int = 1, **options: Any) -> None:
        others = self.take_options(options)
        # With sizes of their own, heads need not divide the width.
        head_dim = self.value_dim if self.key_dim and self.value_dim else 0
        super().__init__(embed_dim, num_heads, head_dim, **others)
        self.key_dim, self.value_dim = self.key_dim or max(1, self.head_dim // 2), self.value_dim or self.head_dim
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim
        self.q_proj = nn.Linear(embed_dim, keys, bias=False)
        self.k_proj = nn.Linear(embed_dim, keys, bias=False)
        self.v_proj = nn.Linear(embed_dim, values, bias=False)
        self.g_proj = nn.Linear(embed_dim, values, bias=False)
        self.f_a_proj = nn.Linear(embed_dim, self.rank, bias=False)
        self.f_b_proj = nn.Linear(self.rank, keys)
        self.o_norm = nn.RMSNorm(self.value_dim, self.eps)
        self.o_proj = nn.Linear(values, embed_dim, bias=False)

    def reset_special_parameters(self) -> None:
        """Sets the norm to 1."""
        nn.init.ones_(self.o_norm.weight)

    def mix(
        self, x: Tensor, state: State | None, padding: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        q, k, v, logits, low = project(x, [self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj])
        # Sums over all positions that the state remembers, which the norm brings back to 1, can leave float16's range.
        precise = torch.float32 if q.dtype == torch.float16 else q.dtype
        # (batch, time, heads, dim)
        q, k, v = (part.to(precise).unflatten(-1, (self.num_heads, -1)).transpose(0, 1) for part in (q, k, v))
        # log f = log(sigmoid(W_f2 W_f1 x + b)) / 16
        decays = apply_gate(self.f_b_proj(low), "log_sigmoid", scale=1 / TEMPERATURE, backend=self.backend)
        log_decay = decays.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        if padding is not None:  # neither a write nor a decay: the state stays
            k, log_decay = (part.masked_fill(padding[:, :, None, None], 0) for part in (k, log_decay))
        before = None if state is None else state["state"]
        how: dict[str, Any] = {"starts": starts, "in_place": in_place, "backend": self.backend}
        # S_t = Diag(f_t) S_{t-1} + k_t v_t^T,  y_t = q_t S_t
        y, memory = ops.RULES["decay"].for_layer(
            q * self.key_dim**-0.5, k, v, log_decay, None, initial_state=before, **how
        )
        # w * y / rms(y) * silu(W_g x)
        how = {"eps": self.eps, "dtype": logits.dtype, "backend": self.backend}
        out = gated_norm(self.o_norm, y.transpose(0, 1), logits, "silu", **how)
        return self.o_proj(in_rows(out)), {"state": memory}
