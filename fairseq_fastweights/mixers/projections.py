"""The shape of attention's projections: grouped keys and values, heads of any size, biases, norms."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.mixers.mixer import Mixer, check_divisor

PROJECTION_BIASES = ("all", "qkv", "none")


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """(1 + w) x / rms(x), whose w starts at 0, as in Qwen3-Next; computed in float32 at least."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(precise)
        return F.rms_norm(x.to(precise), self.normalized_shape, weight, self.eps).to(x.dtype)


def rms_norm(shape: Any, eps: float, zero_centered: bool = False) -> nn.RMSNorm:
    """An RMS norm (Zhang and Sennrich 2019) of the last dimensions, or a `ZeroCenteredRMSNorm`."""
    check_number("eps", eps, 0)
    return (ZeroCenteredRMSNorm if zero_centered else nn.RMSNorm)(shape, eps=eps)


@dataclass(frozen=True)
class Projections:
    """The shape of attention's projections to queries, keys, values and output.

    Args:
        kv_heads: number of heads of keys and values, each of which serves an equal number of successive heads of
            queries (Ainslie et al. 2023); 0 for the number of heads of queries.
        head_dim: size of each head; 0 for the width divided by the number of heads of queries.
        projection_bias: which projections have biases: "all", "qkv" (all but the output projection, as in Qwen2), or
            "none" (Llama).
        query_key_norm_eps: added under the root of the RMS norm that queries and keys have in each head (Qwen3); None
            for no norm.
        zero_centered_norms: whether these norms multiply by 1 + w, as `ZeroCenteredRMSNorm`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.
    """

    kv_heads: int = 0
    head_dim: int = 0
    projection_bias: str = "all"
    query_key_norm_eps: float | None = None
    zero_centered_norms: bool = False

    def __post_init__(self) -> None:
        if self.projection_bias not in PROJECTION_BIASES:
            raise InvalidInput(
                f"projection_bias is {self.projection_bias!r}; it must be one of {', '.join(PROJECTION_BIASES)}"
            )
        if self.query_key_norm_eps is not None:
            check_number("query_key_norm_eps", self.query_key_norm_eps, 0)

    def norm(self, dim: int) -> nn.Module:
        """Makes the norm of queries or of keys, (..., dim)."""
        if self.query_key_norm_eps is None:
            return nn.Identity()
        return rms_norm(dim, self.query_key_norm_eps, self.zero_centered_norms)


SETTINGS = tuple(setting.name for setting in fields(Projections))
"""The names of its arguments, which are arguments of mixers too."""


class Attention(Mixer):
    """Base class of attention: a Transformer's projections, with fairseq's names and initial values.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim` unless `head_dim` is given.
        dropout: a probability; subclasses say where.
        backend, batch_first: as in `Mixer`.
        **shape: the arguments of `Projections`.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    _drawing_order = "qkv"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        backend: str = "auto",
        batch_first: bool = False,
        **shape: Any,
    ) -> None:
        self._shape = Projections(**shape)
        super().__init__(embed_dim, num_heads, self._shape.head_dim, backend=backend, batch_first=batch_first)
        check_number("dropout", dropout, 0, 1)
        self.dropout_module = nn.Dropout(dropout)

    def _make_projections(self, bias: bool, key_dim: int, source_dim: int) -> None:
        """Makes the projections of inputs (..., embed_dim), for keys and values (..., source_dim)."""
        check_divisor("kv_heads", self._shape.kv_heads, "num_heads", self.num_heads, or_zero=True)
        heads, kv_heads = self.num_heads, self._shape.kv_heads or self.num_heads
        sizes = {
            "q": (self.embed_dim, heads * key_dim),
            "k": (source_dim, kv_heads * key_dim),
            "v": (source_dim, kv_heads * self.head_dim),
        }
        biases = self._shape.projection_bias if bias else "none"
        for name in self._drawing_order:
            self.add_module(f"{name}_proj", nn.Linear(*sizes[name], bias=biases != "none"))
        self.out_proj = nn.Linear(heads * self.head_dim, self.embed_dim, bias=biases == "all")
        self.q_norm, self.k_norm = self._shape.norm(key_dim), self._shape.norm(key_dim)

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does."""
        # Smaller where one input is projected to all three, as if they were one matrix.
        gain = 1 / math.sqrt(2) if self.k_proj.in_features == self.embed_dim else 1.0
        for name in self._drawing_order:
            nn.init.xavier_uniform_(getattr(self, f"{name}_proj").weight, gain=gain)
        reset_linear(self.out_proj)


def reset_linear(module: nn.Linear) -> None:
    """Draws a projection's weight from Xavier's uniform distribution, and sets its bias, if any, to 0."""
    nn.init.xavier_uniform_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def shared(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Repeats each head of `x` along `dim` for the heads of queries that share it, to `num_heads` heads."""
    heads = x.shape[dim]
    return x if heads == num_heads else x.repeat_interleave(num_heads // heads, dim)
