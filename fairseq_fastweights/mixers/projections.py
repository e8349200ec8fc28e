"""How attention is projected: grouped keys and values, heads of any size, which projections have biases."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor, nn

PROJECTION_BIASES = ("all", "qkv", "none")


@dataclass(frozen=True)
class Projections:
    """Projections of attention to queries, keys, values and output, as models after the first Transformer vary them.

    Args:
        kv_heads: heads of keys and values, each of which serves as many heads of queries in turn (Ainslie et al. 2023);
            0 for as many as there are of queries.
        head_dim: of each head; 0 for the width over the heads of queries.
        projection_bias: which projections have biases: "all", "qkv" (not that of the output: Qwen2), or "none" (Llama).
        query_key_norm_eps: queries and keys have an RMS norm in each head, with this under the root (Qwen3); None: they
            have none.

    Raises:
        ValueError: naming the argument, what it was and what it may be.
    """

    kv_heads: int = 0
    head_dim: int = 0
    projection_bias: str = "all"
    query_key_norm_eps: float | None = None

    def __post_init__(self) -> None:
        if self.projection_bias not in PROJECTION_BIASES:
            raise ValueError(
                f"projection_bias is {self.projection_bias!r}; it must be one of {', '.join(PROJECTION_BIASES)}"
            )
        if self.query_key_norm_eps is not None and not self.query_key_norm_eps >= 0:
            raise ValueError(f"query_key_norm_eps is {self.query_key_norm_eps}; it must be at least 0")

    def count_kv_heads(self, num_heads: int) -> int:
        """How many there are for so many heads of queries.

        Raises:
            ValueError: if they cannot be shared evenly.
        """
        if self.kv_heads < 0 or (self.kv_heads and num_heads % self.kv_heads):
            raise ValueError(
                f"kv_heads is {self.kv_heads}; it must be a divisor of the {num_heads} heads, or 0 for all"
            )
        return self.kv_heads or num_heads

    def norm(self, head_dim: int) -> nn.Module:
        """That of queries or of keys, (..., head_dim)."""
        return nn.Identity() if self.query_key_norm_eps is None else nn.RMSNorm(head_dim, eps=self.query_key_norm_eps)


SETTINGS = tuple(setting.name for setting in fields(Projections))
"""The names of its arguments, by which mixers take them too."""


def shared(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """`x` with `num_heads` heads along `dim`, each of its own repeated for the heads of queries that share it."""
    heads = x.shape[dim]
    return x if heads == num_heads else x.repeat_interleave(num_heads // heads, dim)
