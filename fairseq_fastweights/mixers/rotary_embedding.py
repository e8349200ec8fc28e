"""Vectors that are turned by their positions (Su et al. 2021): products of two depend on how far apart they are."""

from __future__ import annotations

import torch
from torch import Tensor


def turns(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which vectors at these positions are turned.

    Args:
        positions: (...), in the type in which angles are computed: bfloat16 cannot tell position 300 from 301.
        dim: how many of a vector's dimensions are turned, an even number.
        base: the slowest pair of them turns about once in 2 pi x base positions.
        dtype: of the result.

    Returns:
        (..., dim / 2) each.
    """
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=positions.dtype) / dim
    angles = positions[..., None] * (1.0 / base**exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns x, (..., dim), in the planes of its dimensions i and i + n / 2, n being how many `turns` was asked for."""
    half = cosines.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], dim=-1)
