"""Texts with their padding put behind them, for mixers in which it takes no place."""

from __future__ import annotations

from torch import Tensor


def to_the_end(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """x, (time, batch, dim), with each row's real positions first, in their order, and for `put_back` the order.

    `padding`, (batch, time), is true where a position is padding.
    """
    order = padding.t().long().argsort(dim=0, stable=True)[:, :, None]
    return x.gather(0, order.expand(x.shape)), order


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """x with its positions where they were."""
    return x.new_empty(x.shape).scatter(0, order.expand(x.shape), x)
