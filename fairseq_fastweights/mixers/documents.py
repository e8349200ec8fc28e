"""Several documents, one after the other in a row of a batch: where they begin, and how far into one a position is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_starts(starts: Tensor | None, x: Tensor, padding: Tensor | None) -> Tensor | None:
    """`starts` of a mixer's `forward`, where no padding stands.

    Raises:
        ValueError: if it is no tensor (batch, time) of bool for x, (time, batch, ...).
    """
    if starts is None:
        return None
    shape = x.shape[1], x.shape[0]
    if starts.shape != shape or starts.dtype != torch.bool:
        raise ValueError(
            f"starts has shape {tuple(starts.shape)} and dtype {starts.dtype}; it must be {shape}, (batch, time), of "
            "torch.bool"
        )
    return starts if padding is None else starts & ~padding


def within_documents(starts: Tensor | None, positions: Tensor, length: Any, before: Any) -> tuple[Tensor, Any]:
    """How many positions of its own document each position has before it, and how many there are of the last one.

    Args:
        starts: (batch, time), true where a document begins; None for nowhere.
        positions: (batch, time), how many positions of the row each has before it; one row, if all are alike.
        length: (batch,), how many positions the row has; a number, if all rows have as many.
        before: (batch,), how many positions, read before, the document has that the row begins in; or one number.

    Returns:
        (batch, time), or one row, and (batch,), or one number.
    """
    column = before[:, None] if isinstance(before, Tensor) else before
    if starts is None:
        return positions + column, length + before
    # Where each position's document began, counted from the row's beginning.
    first = positions.new_zeros(len(starts), 1) - column
    began = torch.cat([first, torch.where(starts, positions, first)], dim=1).cummax(dim=1)[0]
    return positions - began[:, 1:], length - began[:, -1]
