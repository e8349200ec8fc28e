"""Moves padding to the ends of rows, for mixers in which it takes no position."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_fastweights.mixers.documents import check_starts
from fairseq_fastweights.mixers.mixer import Mixer, State


class MovesPadding(Mixer):
    """Base class of mixers that compute rows with padding at their ends alone, where it takes no position."""

    takes_starts = True

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        padding: Tensor | None = None,
        *,
        starts: Tensor | None = None,
        overwrite: bool = False,
    ) -> tuple[Tensor, State]:
        """Mixes rows whose padding is moved to their ends and set to 0; shapes and results as of `Mixer.forward`."""
        starts = check_starts(starts, x, padding)
        if padding is None:
            return self._mix(x, None, starts, state, overwrite)
        text, order = to_the_end(x.masked_fill(padding.t()[..., None], 0), padding)
        starts = None if starts is None else rows_to_the_end(starts, order)
        out, state = self._mix(text, (~padding).sum(1), starts, state, overwrite)
        return put_back(out, order), state

    def _mix(
        self, text: Tensor, lengths: Tensor | None, starts: Tensor | None, state: State | None, overwrite: bool
    ) -> tuple[Tensor, State]:
        """Computes rows of these lengths, (batch,), with padding at their ends; None for rows without padding."""
        raise NotImplementedError


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
