"""Moves padding to the ends of rows, for mixers in which it takes no position."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fairseq_fastweights.mixers.documents import check_starts
from fairseq_fastweights.mixers.mixer import State


def without_padding(
    mix: Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, State]],
    x: Tensor,
    padding: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, State]:
    """Calls `mix` with the padding, (batch, time), of x, (time, batch, dim), moved to the ends of rows and set to 0.

    `mix` gets these rows, their lengths, (batch,) or None without padding, and `starts`, moved alike. Its output is
    moved back.
    """
    starts = check_starts(starts, x, padding)
    if padding is None:
        return mix(x, None, starts)
    text, order = to_the_end(x.masked_fill(padding.t()[..., None], 0), padding)
    out, state = mix(text, (~padding).sum(1), None if starts is None else rows_to_the_end(starts, order))
    return put_back(out, order), state


def beyond(time: int, lengths: Tensor) -> Tensor:
    """A mask (time, batch), true after the end of rows of these lengths, (batch,)."""
    return torch.arange(time, device=lengths.device)[:, None] >= lengths


def to_the_end(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the positions of x, (time, batch, dim), that are not padding to the front; also returns the order.

    `padding`, (batch, time), is true where a position is padding.
    """
    order = padding.t().long().argsort(dim=0, stable=True)[:, :, None]
    return x.gather(0, order.expand(x.shape)), order


def rows_to_the_end(x: Tensor, order: Tensor) -> Tensor:
    """Puts x, (batch, time), in the order that `to_the_end` returned."""
    return x.gather(1, order[:, :, 0].t())


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """Undoes `to_the_end`."""
    return x.new_empty(x.shape).scatter(0, order.expand(x.shape), x)
