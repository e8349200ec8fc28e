"""Texts with their padding put behind them, for mixers in which it takes no place."""

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
    """What `mix` makes of x, (time, batch, dim), whatever stands at its padding, (batch, time), and wherever that is.

    `mix` is given rows with zeros behind them, their lengths, (batch,), None where there is no padding, and where
    documents begin in them, `starts` as a mixer's `forward` has it.
    """
    starts = check_starts(starts, x, padding)
    if padding is None:
        return mix(x, None, starts)
    text, order = to_the_end(x.masked_fill(padding.t()[..., None], 0), padding)
    out, state = mix(text, (~padding).sum(1), None if starts is None else rows_to_the_end(starts, order))
    return put_back(out, order), state


def beyond(time: int, lengths: Tensor) -> Tensor:
    """(time, batch), true behind rows of these lengths, (batch,)."""
    return torch.arange(time, device=lengths.device)[:, None] >= lengths


def to_the_end(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """x, (time, batch, dim), with each row's real positions first, in their order, and for `put_back` the order.

    `padding`, (batch, time), is true where a position is padding.
    """
    order = padding.t().long().argsort(dim=0, stable=True)[:, :, None]
    return x.gather(0, order.expand(x.shape)), order


def rows_to_the_end(x: Tensor, order: Tensor) -> Tensor:
    """x, (batch, time), in the order of `to_the_end`."""
    return x.gather(1, order[:, :, 0].t())


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """x with its positions where they were."""
    return x.new_empty(x.shape).scatter(0, order.expand(x.shape), x)
