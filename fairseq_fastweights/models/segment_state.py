"""The state that passes from one segment of a text to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import Mixer, State


class SegmentState(dict[Mixer, State]):
    """An incremental state for whole segments: reads the state after the last segment, writes that after this one.

    The two are stored apart, so that a layer that is computed twice (activation checkpointing) starts in the same state
    both times.

    Args:
        carried: the states after the last segment, by mixer; empty for none.
        continues: (batch,), true for rows that continue from their state; those of other rows start as zeros.

    Raises:
        ValueError: if rows continue a batch that had another number of rows.
    """

    def __init__(self, carried: dict[Mixer, State], continues: Tensor) -> None:
        rows = {x.shape[0] for buffer in carried.values() for x in buffer.values()}
        fits = rows <= {continues.shape[0]}
        if not fits and bool(continues.any()):
            raise InvalidInput(
                f"continues has {continues.shape[0]} rows, but the segments before had {rows.pop()}; rows can only "
                "continue a batch of the same size"
            )
        super().__init__(
            {
                key: {
                    name: torch.where(continues.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros_like(x))
                    for name, x in buffer.items()
                }
                for key, buffer in (carried.items() if fits else ())
            }
        )
        self._written: dict[Mixer, State] = {}

    @classmethod
    def starting(cls, states: dict[Mixer, State]) -> SegmentState:
        """A segment that starts in these states, in all rows."""
        segment = cls({}, torch.zeros(0, dtype=torch.bool))
        dict.update(segment, states)
        return segment

    def __setitem__(self, mixer: Mixer, state: State) -> None:
        self._written[mixer] = state

    def detached(self) -> dict[Mixer, State]:
        """The states in which the next segment starts. A layer that LayerDrop dropped keeps the state before."""
        return {
            key: {name: x.detach() for name, x in buffer.items()}
            for key, buffer in {**dict(self.items()), **self._written}.items()
        }
