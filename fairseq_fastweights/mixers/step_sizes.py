"""Initial step sizes of Mamba and of gated delta networks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_STEP, LARGEST_STEP = 1e-3, 1e-1
"""The range of initial step sizes (Gu & Dao 2023, Sec. 3.6), whose logarithms are uniform, as in the authors' code."""


@torch.no_grad()
def draw_step_biases_(bias: Tensor) -> None:
    """Fills `bias` with numbers whose softplus is from `SMALLEST_STEP` to `LARGEST_STEP`."""
    logs = torch.empty_like(bias, dtype=torch.float32)
    step = logs.uniform_(math.log(SMALLEST_STEP), math.log(LARGEST_STEP)).exp()
    bias.copy_(step + torch.log(-torch.expm1(-step)))
