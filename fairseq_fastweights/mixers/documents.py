"""Several documents, one after the other in a row of a batch: where they begin, and how far into one a position is."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


@overload
def check_starts(starts: Tensor, x: Tensor, padding: Tensor | None) -> Tensor: ...
@overload
def check_starts(starts: None, x: Tensor, padding: Tensor | None) -> None: ...
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


def within_documents(
    starts: Tensor | None, positions: Tensor, length: Tensor | int, before: Tensor | int
) -> tuple[Tensor, Tensor]:
    """How many positions of its own document each position has before it, and how many there are of the last one.

    Args:
        starts: (batch, time), true where a document begins; None for nowhere.
        positions: (batch, time), how many positions of the row each has before it; one row, if all are alike.
        length: (batch,), how many positions the row has.
        before: (batch,), how many positions, read before, the document has that the row begins in.

    Returns:
        (batch, time) and (batch,).
    """
    before = torch.as_tensor(before, device=positions.device).reshape(-1, 1)
    if starts is None:
        return positions + before, length + before[:, 0]
    began = torch.where(starts, positions, -before)
    began = torch.cat([(-before).expand(len(began), 1), began], dim=1).cummax(dim=1)[0]
    return positions - began[:, 1:], length - began[:, -1]
