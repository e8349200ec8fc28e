"""Where the sizes of steps through continuous time start, as Mamba and gated delta networks have them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_STEP, LARGEST_STEP = 1e-3, 1e-1
"""Between which the sizes of steps start (Gu & Dao 2023, Sec. 3.6): as in the authors' code, evenly in logarithms."""


@torch.no_grad()
def draw_step_biases_(bias: Tensor) -> None:
    """Fills `bias` with numbers of which softplus makes steps of `SMALLEST_STEP` to `LARGEST_STEP`."""
    logs = torch.empty_like(bias, dtype=torch.float32)
    step = logs.uniform_(math.log(SMALLEST_STEP), math.log(LARGEST_STEP)).exp()
    bias.copy_(step + torch.log(-torch.expm1(-step)))
