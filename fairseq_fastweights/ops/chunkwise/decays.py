"""Products of decays within a chunk, of which none exceeds 1 and none is divided or subtracted (`diagonal`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.ops.chunkwise.layout import times_lower
from fairseq_fastweights.ops.once import differentiable_once


def halves(length: int) -> list[int]:
    """1, 2, 4, ... up to half of `length`, a power of two."""
    return [1 << i for i in range(length.bit_length() - 1)]


def split(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Views of the first and second halves of the blocks of 2 * half steps: (..., blocks, half, dim) each."""
    *others, length, dim = x.shape
    blocks = x.view(*others, length // (2 * half), 2, half, dim)
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def decays_around_middle(
    log_decay: Tensor | None, half: int
) -> tuple[tuple[None, Tensor | None], tuple[Tensor | None, None]]:
    """Factors from each block's middle to the steps after it, and from the steps before it to the middle."""
    if log_decay is None:
        return (None, None), (None, None)
    first, second = split(log_decay, half)
    return (None, second.cumsum(-2).exp()), (exclusive_suffix_sums(first).exp(), None)


def inclusive(log_decay: Tensor | None) -> Tensor | None:
    """Factors from a chunk's start to each of its steps."""
    return None if log_decay is None else log_decay.cumsum(-2).exp()


def exclusive_reverse(log_decay: Tensor | None) -> Tensor | None:
    """Factors from each step to its chunk's end."""
    return None if log_decay is None else exclusive_suffix_sums(log_decay).exp()


def suffix_sums(x: Tensor) -> Tensor:
    """Sums over each step and all later ones."""
    return x.flip(-2).cumsum(-2).flip(-2)


def exclusive_suffix_sums(x: Tensor) -> Tensor:
    """Sums over all later steps; shifted rather than subtracted, to keep the digits of small terms."""
    return torch.cat([suffix_sums(x[..., 1:, :]), torch.zeros_like(x[..., :1, :])], dim=-2)


def exclusive_prefix_sums(x: Tensor) -> Tensor:
    """Sums over all earlier steps."""
    return torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :].cumsum(-2)], dim=-2)


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """The product; no factor is 1."""
    return x if factor is None else x * factor


def scores(readers: Tensor, read: Tensor, log_decay: Tensor | None) -> Tensor:
    """<readers_t, read_s> with the decays of (s, t] between them for s <= t, 0 elsewhere: (..., length, length)."""
    if log_decay is None:
        return _LowerProducts.apply(readers, read)
    if log_decay.shape[-1] == 1:  # a number for each pair (s, t], of no more size than the products
        added = log_decay.expand(*log_decay.shape[:-1], log_decay.shape[-2]).tril(-1)  # [u, s]: by step u > s
        return _LowerProducts.apply(readers, read) * added.cumsum(-2).exp()
    *others, length, _ = readers.shape
    result = torch.diag_embed((readers * read).sum(-1))
    for half in halves(length):
        (_, a), (b, _) = split(readers, half), split(read, half)
        (_, after), (before, _) = decays_around_middle(log_decay, half)
        met = times(a, after) @ times(b, before).transpose(-1, -2)
        count = length // (2 * half)
        # Of each block the lower left quarter: a diagonal of such blocks.
        blocks = torch.zeros(*others, count, 2, half, count, 2, half, dtype=met.dtype, device=met.device)
        blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).copy_(met.movedim(-3, -1))
        result = result + blocks.view(*others, length, length)
    return result


class _LowerProducts(torch.autograd.Function):
    """<readers_t, read_s> for s <= t, with gradients of readers to which nothing that is read later comes."""

    @staticmethod
    def forward(ctx: Any, readers: Tensor, read: Tensor) -> Tensor:
        ctx.save_for_backward(readers, read)
        return (readers @ read.transpose(-1, -2)).tril_()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, Tensor], gradient: Tensor) -> tuple[Tensor, Tensor]:
        readers, read = saved
        gradient = gradient.tril()
        return times_lower(gradient, read), gradient.transpose(-1, -2) @ readers
