"""fairseq's iterator over the segments of streams, whose place and states are part of a checkpoint."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from fairseq.data import iterators
from torch import Tensor

from fairseq_fastweights.data.segment_streams import SegmentStreams, Span
from fairseq_fastweights.invalid_input import InvalidInput

logger = logging.getLogger(__name__)

States = list[dict[str, Tensor]]


class CarriesStates(Protocol):
    """A model that carries states from segment to segment."""

    def carried_states(self) -> States:
        """The states in which the next segments start, for each layer: tensors (rows, ...) on the CPU; [] for none."""
        ...

    def restore_carried_states(self, states: States) -> None:
        """Lets the next segments start in such states."""
        ...


class SegmentIterator(iterators.EpochBatchIterator):
    """fairseq's iterator over `SegmentStreams`; within an epoch, its state for checkpoints includes the model's states.

    Checkpoints keep, for every stream, the text that is left and its states. A run with another number of streams or of
    processes, or with other segments, continues from there (`distribute`). Without states they keep how many segments
    were read, of all streams together.

    Args:
        streams: the segments.
        carrier: the model that reads them in training; None in evaluation, and where no state is carried over.
        others: the arguments of fairseq's iterator.
    """

    def __init__(self, streams: SegmentStreams, carrier: CarriesStates | None, **others: Any) -> None:
        super().__init__(dataset=streams, collate_fn=streams.collater, disable_shuffling=True, **others)
        self._carrier = carrier
        self._gathered: States | None = None
        # Batches of the epoch before those of `dataset`, and segments before these.
        self._before, self._segments_before = 0, 0

    def gather_states(self) -> None:
        """Sends the states of all processes to the first, which writes checkpoints; all processes must call it."""
        if self._carrier is None or self.num_shards == 1 or self.end_of_epoch():
            return
        everyone: list[Any] | None = [None] * self.num_shards if self.shard_id == 0 else None
        # On CPUs: the states are there already, and need not pass through a GPU.
        group = dist.new_group(backend="gloo")
        dist.gather_object(self._carrier.carried_states(), everyone, group=group)
        dist.destroy_process_group(group)
        self._gathered = None if everyone is None else join(everyone)

    def state_dict(self) -> dict[str, Any]:
        # Not kept: with other streams, the next run's samples are other segments.
        state = super().state_dict() | {"samples": None}
        if self._carrier is None:
            batches = self.frozen_batches[: state["iterations_in_epoch"] * self.num_shards]
            read = self._segments_before + sum(map(len, batches))
            return state | {"segments_read": read, "layout": self._layout}
        if state["iterations_in_epoch"] == 0:
            return state
        states = self._carrier.carried_states() if self.num_shards == 1 else self._gathered
        self._gathered = None  # frees memory of the size of all processes' states
        if states is None:
            logger.warning("the states of other processes were not gathered; the checkpoint has none")
            return state
        streams, read = self.dataset, state["iterations_in_epoch"] - self._before
        rest = [streams.rest(stream, read) for stream in range(streams.streams)]
        state["carried_states"] = {"tokens": len(streams.corpus), "rest": rest, "states": states}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        read = state_dict["iterations_in_epoch"]
        if self._carrier is not None:
            if read and "segments_read" in state_dict:
                self._refuse("carry_over_state", True, False)
            carried = state_dict.get("carried_states")
            if carried is not None and carried["states"]:
                self._resume(self._carrier, carried, read)
        elif read and "segments_read" in state_dict:
            self._leave_out(state_dict["segments_read"], read, state_dict["layout"])
        elif "carried_states" in state_dict:
            self._refuse("carry_over_state", False, True)
        # fairseq's method refuses the samples of another kind of iterator.
        super().load_state_dict({name: x for name, x in state_dict.items() if name != "samples" or x is not None})

    @property
    def _layout(self) -> dict[str, int]:
        """The options that decide which segments there are."""
        return {"text_streams": self.dataset.streams, "tokens_per_sample": self.dataset.length}

    def _leave_out(self, segments: int, batches: int, layout: dict[str, int]) -> None:
        """Goes on after a number of segments, which were read in so many batches of each process."""
        for option, ours in self._layout.items():
            if ours != layout[option]:
                self._refuse(option, ours, layout[option])
        # All segments in order, without those that were read; fairseq drops as many batches as were read, so empty ones
        # stand in their place.
        left = [number for batch in self.frozen_batches for number in batch][segments:]
        rows = len(self.frozen_batches[0])
        self._segments_before = segments
        self._frozen_batches = ((),) * (batches * self.num_shards) + tuple(
            left[first : first + rows] for first in range(0, len(left), rows)
        )

    @staticmethod
    def _refuse(option: str, ours: object, former: object) -> NoReturn:
        raise InvalidInput(
            f"{option} is {ours}, but the checkpoint stopped within an epoch with {former}; it must be that, or "
            "--reset-dataloader be given, which begins an epoch"
        )

    def _resume(self, carrier: CarriesStates, carried: dict[str, Any], read: int) -> None:
        """Continues an epoch after `read` batches, unless the states belong to another text."""
        old: SegmentStreams = self.dataset
        if carried["tokens"] != len(old.corpus):
            logger.warning(
                "the checkpoint's states are not used: they belong to a text of %s tokens, not of %s",
                f"{carried['tokens']:,}",
                f"{len(old.corpus):,}",
            )
            return
        rest = [[(start, stop) for start, stop in row] for row in carried["rest"]]
        rows, sources = distribute(rest, old.streams)
        if len(rest) != old.streams and self.shard_id == 0:
            pairs = [f"{number} continues {source}" for number, source in enumerate(sources) if source is not None]
            logger.warning(
                "carry_over_state: the rest of the text of %s streams is divided among %s: %s, with their states; all "
                "others start from empty states",
                len(rest),
                len(rows),
                ", ".join(pairs),
            )
        begun = [source is not None for source in sources]
        self.dataset: SegmentStreams = old.reading(rows, begun)
        self.collate_fn, self._before = self.dataset.collater, read
        # fairseq drops as many batches as were read.
        self._frozen_batches = ((),) * (read * self.num_shards) + tuple(self.dataset.batches(self.num_shards))
        # A stream without a source gets any state: its first segment says that it does not continue.
        own = torch.tensor([source or 0 for source in sources]).chunk(self.num_shards)[self.shard_id]
        carrier.restore_carried_states([{name: x[own] for name, x in layer.items()} for layer in carried["states"]])


def join(everyone: list[States]) -> States:
    """Concatenates the states of all processes; those of a layer that a process never ran are zeros, that is, empty."""
    layers = []
    for parts in zip(*everyone, strict=True):
        some: dict[str, Tensor] = next(filter(None, parts), {})
        layers.append({name: torch.cat([x.get(name, torch.zeros_like(y)) for x in parts]) for name, y in some.items()})
    return layers


def distribute(rest: list[list[Span]], streams: int) -> tuple[list[list[Span]], list[int | None]]:
    """Divides the text that earlier streams have left among `streams` streams, every token once.

    If there are fewer streams than before, one reads the rest of several; if there are more, several share the rest of
    one.

    Returns:
        the text of each stream, and the number of the earlier stream that it continues at its beginning, or None.
    """
    rows: list[list[Span]] = []
    sources: list[int | None] = []
    # Fewer streams: each takes the rest of several successive ones, and the states of the first that has any left.
    if streams <= len(rest):
        for first, end in pairwise(len(rest) * i // streams for i in range(streams + 1)):
            rows.append([span for spans in rest[first:end] for span in spans])
            sources.append(next((number for number in range(first, end) if rest[number]), None))
        return rows, sources
    # More streams: each former one is cut into equal parts, and only the first part continues its states.
    for number, (first, end) in enumerate(pairwise(streams * i // len(rest) for i in range(len(rest) + 1))):
        rows += _cut(rest[number], end - first)
        sources += [number if rest[number] else None, *[None] * (end - first - 1)]
    return rows, sources


def _cut(spans: list[Span], parts: int) -> list[list[Span]]:
    """Divides a text into parts of equal length, up to one token; the first is never empty."""
    tokens = sum(stop - start for start, stop in spans)
    rows = []
    for first, end in pairwise(-(-tokens * i // parts) for i in range(parts + 1)):
        row, passed = [], 0
        for start, stop in spans:
            begin, finish = max(start, start + first - passed), min(stop, start + end - passed)
            if begin < finish:
                row.append((begin, finish))
            passed += stop - start
        rows.append(row)
    return rows
