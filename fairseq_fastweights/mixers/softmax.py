"""The base class of mixers with a softmax: a Transformer's projections."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from fairseq_fastweights.invalid_input import check_number
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.projections import Projections


class SoftmaxMixer(Mixer):
    """A Transformer's projections to queries, keys, values and output, with fairseq's names and initial values.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim` unless `head_dim` is given.
        dropout: of the attention weights.
        bias: whether the projections have biases.
        shape: the arguments of `Projections`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        **shape: Any,
    ) -> None:
        projections = Projections(**shape)
        super().__init__(embed_dim, num_heads, projections.head_dim)
        check_number("dropout", dropout, 0, 1)
        self.dropout_module = nn.Dropout(dropout)
        inner, kv_inner = (heads * self.head_dim for heads in (num_heads, projections.count_kv_heads(num_heads)))
        inputs_biased, output_biased = (
            bias and projections.projection_bias != "none",
            bias and projections.projection_bias == "all",
        )
        self.k_proj = nn.Linear(embed_dim, kv_inner, bias=inputs_biased)
        self.v_proj = nn.Linear(embed_dim, kv_inner, bias=inputs_biased)
        self.q_proj = nn.Linear(embed_dim, inner, bias=inputs_biased)
        self.out_proj = nn.Linear(inner, embed_dim, bias=output_biased)
        self.q_norm, self.k_norm = projections.norm(self.head_dim), projections.norm(self.head_dim)

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, in its order."""
        for module in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(module.weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def _heads(self, x: Tensor) -> Tensor:
        """(time, batch, heads * dim) -> (batch, heads, time, dim), without a copy."""
        return x.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)

    def _dropout(self) -> float:
        """The probability of dropout of attention weights: 0 in evaluation."""
        drops = self.training or getattr(self.dropout_module, "apply_during_inference", False)  # fairseq's
        return self.dropout_module.p if drops else 0.0
