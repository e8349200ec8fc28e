"""Several documents, one after the other in a row of a batch: checks of their starts, and positions within them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.invalid_input import InvalidInput


def check_starts(starts: Tensor | None, x: Tensor, padding: Tensor | None) -> Tensor | None:
    """Checks `starts`, the argument of a mixer's `forward`, and clears it at padding.

    Raises:
        ValueError: if it is not a bool tensor (batch, time), for x of (time, batch, ...).
    """
    if starts is None:
        return None
    shape = x.shape[1], x.shape[0]
    if starts.shape != shape or starts.dtype != torch.bool:
        raise InvalidInput(
            f"starts has shape {tuple(starts.shape)} and dtype {starts.dtype}; it must be {shape}, (batch, time), of "
            "torch.bool"
        )
    return starts if padding is None else starts & ~padding


def within_documents(starts: Tensor | None, positions: Tensor, length: Any, before: Any) -> tuple[Tensor, Any]:
    """Counts positions from the beginning of each document.

    Args:
        starts: (batch, time), true where a document begins; None for nowhere.
        positions: (batch, time), the number of positions before each in its row; one row if all rows are alike.
        length: (batch,), the number of positions of each row; a number if all rows are alike.
        before: (batch,), the number of positions, in earlier calls, of the document that continues; or one number.

    Returns:
        the number of positions before each in its document, (batch, time) or one row, and the number of positions of
        the last document so far, (batch,) or one number.
    """
    column = before[:, None] if isinstance(before, Tensor) else before
    if starts is None:
        return positions + column, length + before
    # Where each position's document began, counted from the row's beginning.
    first = positions.new_zeros(len(starts), 1) - column
    began = torch.cat([first, torch.where(starts, positions, first)], dim=1).cummax(dim=1)[0]
    return positions - began[:, 1:], length - began[:, -1]
