"""Retention: linear attention whose state decays at a fixed rate in each head (Sun et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_fastweights import ops
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.linear_attention import LinearAttention
from fairseq_fastweights.mixers.mixer import VALUE_SIZES, State, gated_norm, option, within_documents
from fairseq_fastweights.mixers.projections import reset_linear
from fairseq_fastweights.mixers.rotary_embedding import rotate, turns
from fairseq_fastweights.ops.elementwise import apply_gate

ROTARY_BASE = 10000.0
"""The base of the rotation of queries and keys, which has all dimensions of each head (Sec. 2.1)."""

GROUP_NORM_EPS = 1e-5
"""The default of the term under the root of the output norm; torch's, as the paper gives none."""


class Retention(LinearAttention):
    """Causal multi-scale retention (Sun et al. 2023, Eq. 6 and 8).

        q, k = phi(W_q x), phi(W_k x), rotated by their positions (Su et al. 2021)
        S_t = gamma S_{t-1} + v_t k_t^T,  y_t = S_t q_t,  gamma = 1 - 2^(-5 - h) in head h = 0, 1, ...
        out = W_out (scale * swish(W_g x) * norm(y / sqrt(m))), norm to mean 0 and variance 1 in each head,
                                                                m the size of q and k

    With `rms_norm` the norm is w * y / rms(y), with a weight for each number of a head, and keeps the mean, as in
    flash-linear-attention.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim` unless `value_dim` is given.
        value_dim: size of each head of values, and of each of keys unless `feature_dim` is given; 0 for
            embed_dim / num_heads.
        rms_norm: whether the norm is an RMS norm with weights.
        eps: added under the root of the norm.
        feature_map: a key of `feature_maps.FEATURE_MAPS`; None for "identity".
        normalization: None or empty; the only normalisation is the one in the equation.
        bias: whether the projections have biases.
        **options: `backend`, `batch_first`, `feature_dim`, `dpfp_nu`, `favor_features`, `scale_read_out` and
            `dropout`, as in `LinearAttention`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = Retention(16, 2)(torch.randn(7, 3, 16))  # (time, batch, embed_dim)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'state': (3, 2, 8, 8), 'position': (3,)}
    """

    value_dim: int = option(0, "dimension of each head's values; 0 is the width divided by the heads", VALUE_SIZES, 0)
    rms_norm: bool = option(False, "norm the output by an RMS norm with weights, as flash-linear-attention")
    eps: float = option(GROUP_NORM_EPS, "epsilon of the output norm", least=0)

    takes_starts = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str | None = None,
        normalization: frozenset[str] | None = None,
        bias: bool = True,
        **options: Any,
    ) -> None:
        if normalization:
            raise InvalidInput(
                f"normalization is {','.join(sorted(normalization))!r}; with retention it must be none: the output "
                "is normalised in each head"
            )
        options = self.take_options(options) | {"head_dim": self.value_dim}
        super().__init__(embed_dim, num_heads, feature_map=feature_map or self.papers_map, bias=bias, **options)
        if self.feature_map.output_dim % 2:
            raise InvalidInput(
                f"the feature map gives keys {self.feature_map.output_dim} dimensions; with retention their number "
                "must be even: they are rotated in pairs"
            )
        # A state that fades over thousands of steps holds sums of as many products, normalised after the read.
        self.needs_float32_range = True
        self.value_dim = self.head_dim
        self.g_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias)
        if self.rms_norm:
            self.o_norm = nn.RMSNorm(self.head_dim, self.eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does."""
        super().reset_parameters()
        reset_linear(self.g_proj)

    def mix(
        self, x: Tensor, state: State | None, padding: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        time, batch, _ = x.shape
        # (batch, time, heads, m) and, of v, (batch, time, heads, head_dim)
        q, k, v, _ = self._inputs(x)
        before = {} if state is None else state
        positions = torch.arange(time, device=x.device)[None] if padding is None else (~padding).cumsum(dim=1) - 1
        read = torch.full((batch,), time, device=x.device) if padding is None else (~padding).sum(dim=1)
        positions, read = within_documents(starts, positions, read, before.get("position", 0))
        # Texts that are carried over have millions of positions, which differ by less than float32 can tell.
        turned = turns(positions[..., None].double(), q.shape[-1], ROTARY_BASE, q.dtype)
        q, k = rotate(q, *turned), rotate(k, *turned)
        decays = log_decays(self.num_heads, x.device, ops.state_dtype(x.dtype)).expand(batch, time, self.num_heads)
        if padding is not None:  # neither a write nor a decay: the state stays
            k = k.masked_fill(padding[:, :, None, None], 0)
            decays = decays.masked_fill(padding[:, :, None], 0)
        how: dict[str, Any] = {"starts": starts, "in_place": in_place, "backend": self.backend}
        out, memory = retention(q, k, v, decays, initial_state=before.get("state"), **how)
        # swish(W_g x) * norm(y / sqrt(m))
        y, logits, size = out.transpose(0, 1), self.g_proj(x), self.feature_map.output_dim
        how = {"dtype": out.dtype, "backend": self.backend}
        if self.rms_norm:
            out = gated_norm(self.o_norm, y, logits, "silu", eps=self.eps, size=size, **how)
        else:
            # The norm of y / sqrt(m) is that of y with m times the epsilon.
            out = apply_gate(logits, "silu", y=y, norm="layer", eps=self.eps * size, **how)
        return self._project_out(self._heads(out, self.head_dim), x), {"state": memory, "position": read}

    def reset_special_parameters(self) -> None:
        """Sets the weights of the norm to 1."""
        if self.rms_norm:
            nn.init.ones_(self.o_norm.weight)

    def settings(self) -> dict[str, Any]:
        """The settings that names and shapes of parameters do not show."""
        return super().settings() | ({} if self.eps == GROUP_NORM_EPS else {"eps": self.eps})


def retention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """S_t = gamma S_{t-1} + v_t k_t^T, y_t = S_t q_t (Sun et al. 2023, Eq. 6); log_decay: (batch, time, heads).

    This is the decay rule with one decay for all key dimensions, which runs the gated rule's kernel without the factor
    1 - g. The gated rule itself would need values divided by 1 - gamma, which are up to 2^(4 + heads) times as large
    and do not fit into float16.
    """
    return ops.RULES["decay"].for_layer(q, k, v, log_decay[..., None].expand(k.shape), None, **options)


def log_decays(heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(heads,), log gamma_h, gamma_h = 1 - 2^(-5 - h) for h = 0, 1, ... (Sun et al. 2023, Eq. 8)."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, device=device, dtype=dtype)))
