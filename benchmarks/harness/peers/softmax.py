"""The peer that the rules replace: torch's scaled_dot_product_attention, causal, in its own layout.

Its head dimension is value_dim, for keys too: what a Transformer of the same width has.
"""

from __future__ import annotations

from torch.nn import functional as F

from harness.cases import Inputs, Shape
from harness.contestants import Contestant, Unsuitable, Work, leaf

NAME = "SDPA"


def contestants() -> list[Contestant]:
    return [Contestant(NAME, "softmax", _prepare, same=False)]


def _prepare(shape: Shape, inputs: Inputs) -> Work:
    if shape.steps:
        raise Unsuitable  # a token's time depends on how many there are before it: see generation.py
    q, k, v = (leaf(x.transpose(1, 2)) for x in (inputs.wide_q, inputs.wide_k, inputs.v))
    return Work(
        forward=lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        inputs=[q, k, v],
        d_out=inputs.d_out.transpose(1, 2).contiguous(),
        as_reference=lambda out: out.transpose(1, 2),
    )
