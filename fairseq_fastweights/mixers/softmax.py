"""What all mixers have that read by a softmax, whatever it goes over."""

from __future__ import annotations

import math

from torch import Tensor, nn

from fairseq_fastweights.mixers.mixer import Mixer


class ReadsBySoftmax(Mixer):
    """A Transformer's projections to queries, keys, values and output, by fairseq's names, drawn as fairseq draws them.

    Args:
        embed_dim, num_heads: width of the input and of the output, and how many heads share it.
        dropout: of the attention weights.
        bias: whether the projections have biases.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(embed_dim, num_heads)
        self.dropout_module = nn.Dropout(dropout)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, in its order."""
        for module in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(module.weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def _heads(self, x: Tensor) -> Tensor:
        """(time, batch, heads * dim) -> (batch, heads, time, dim), without a copy."""
        time, batch, _ = x.shape
        return x.view(time, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def _dropout(self) -> float:
        """With what probability attention weights are dropped now."""
        drops = self.training or getattr(self.dropout_module, "apply_during_inference", False)  # fairseq's
        return self.dropout_module.p if drops else 0.0
