"""The random features that FAVOR+ draws (Choromanski et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonal_features(
    num_features: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw the random features of FAVOR+ from the global generator of a device.

    Args:
        num_features: m, how many.
        dim: numbers of each.
        dtype: of the result.
        device: of the result, and of the generator; None for the CPU.

    Returns:
        (num_features, dim). Each row is distributed as N(0, I); rows within a block of `dim` are
        orthogonal, blocks are independent. The last block is cut to what `num_features` leaves.

    Examples:
        >>> features = orthogonal_features(6, 4)
        >>> gram = features @ features.t()
        >>> gram.shape, torch.allclose(gram[0, 1:4], torch.zeros(3), atol=1e-4)
        (torch.Size([6, 6]), True)
    """
    num_blocks = -(-num_features // dim)
    q, r = torch.linalg.qr(torch.randn(num_blocks, dim, dim, dtype=dtype, device=device))
    # QR leaves the signs of r's diagonal open; with all of them positive q is Haar distributed.
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    q = q * torch.copysign(torch.ones_like(diagonal), diagonal).unsqueeze(-2)
    # The norm of a normal vector: chi distributed with dim degrees of freedom.
    norms = torch.randn(num_features, dim, dtype=dtype, device=device).norm(dim=-1, keepdim=True)
    features: Tensor = q.flatten(0, 1)[:num_features] * norms
    return features
