"""A corpus as parallel streams, each read segment after segment, with states carried over or without."""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from fairseq.data import data_utils
from torch import Tensor

from fairseq_fastweights.data.corpus import Documents, SamplesInOrder, TokenCorpus
from fairseq_fastweights.invalid_input import InvalidInput, check_number

Span = tuple[int, int]
"""The tokens of a corpus from one position to another (exclusive)."""


class SegmentStreams(SamplesInOrder):
    """Divides a corpus into `streams` contiguous parts of equal length (up to one token), and these into segments.

    Batch i holds segment i of every stream, so that row b of a batch continues row b of the batch before, from the
    second batch on; ``net_input["continues"]`` says so if states are carried over. Over all streams every token is
    predicted once. With `documents`, ``net_input["starts"]``, (batch, time), is true where a document begins.

    Args:
        corpus: the text.
        streams: number of streams of all processes; process p of n has the p-th of n equal parts of them.
        segment_length: tokens of a segment.
        pad: the padding symbol, for the ends of streams that are shorter than others.
        documents: the documents of the corpus, to be kept apart; None for one text.
        carried: True if states are carried over. Otherwise every segment starts in an empty state.
        reset_probability: the probability with which a segment starts in an empty state though another came before it.
            Only in training, that is, once `set_epoch` was called: fairseq does so for training alone.
        seed: decides, with the epoch and the segment's place in the text, which segments these are: the same ones
            after an interruption, and for any number of processes.

    Raises:
        ValueError: if there are more streams than tokens, or the segment length is not positive.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        streams: int,
        segment_length: int,
        pad: int,
        documents: Documents | None = None,
        carried: bool = True,
        reset_probability: float = 0.0,
        seed: int = 1,
    ) -> None:
        check_number("tokens_per_sample", segment_length, 1, whole=True)
        check_number("reset_state_probability", reset_probability, 0, 1)
        if not 1 <= streams <= len(corpus):
            raise InvalidInput(
                f"the batch size times the number of processes is {streams}, but split {corpus.name!r} has "
                f"{len(corpus)} tokens: there must be from 1 to {len(corpus)} streams"
            )
        corpus.load()
        self.corpus = corpus
        self.streams = streams
        self.length = segment_length
        self.pad = pad
        self.documents = documents
        self.carried = carried
        self.reset_probability = reset_probability
        self.seed = seed
        self._epoch: int | None = None
        bounds = [len(corpus) * i // streams for i in range(streams + 1)]
        self._read([[span] for span in pairwise(bounds)], [False] * streams)

    def reading(self, rows: list[list[Span]], begun: list[bool]) -> SegmentStreams:
        """The same streams, of another text.

        Args:
            rows: the spans that each stream reads instead of its part of the corpus; none continues another.
            begun: for each stream, whether its first segment continues one that was read before.
        """
        other = copy(self)
        other._read(rows, begun)
        return other

    def _read(self, rows: list[list[Span]], begun: list[bool]) -> None:
        self.rows = rows
        self.begun = begun
        self.segments = max(sum(map(self._segments, row)) for row in rows)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self.segments * self.streams

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Samples are numbered segment by segment: streams 0, 1, ... of segment 0, then those of segment 1.
        segment, stream = divmod(index, self.streams)
        row, rest = self.rows[stream], self.rest(stream, segment)
        start, end = rest[0] if rest else (0, 0)
        stop = min(start + self.length, end)
        # A segment continues the one before unless it is the first of a span: rest[0] is then a whole span of the row.
        continues = self.begun[stream] if segment == 0 else rest[:1] == [] or rest[0] not in row
        sample = {
            "id": index,
            "source": self.corpus.read_inputs(start, stop),
            "target": self.corpus.read_targets(start, stop),
            "continues": continues and not self._resets(start),
        }
        if self.documents is not None:
            sample["starts"] = self.documents.starts(start, stop)
        return sample

    def _resets(self, start: int) -> bool:
        """True if the segment that begins there starts in an empty state by chance."""
        if not self.reset_probability or self._epoch is None:
            return False
        # By the place in the text: the same segments after an interruption, and for any number of processes.
        return np.random.default_rng((self.seed, self._epoch, start)).random() < self.reset_probability

    def _segments(self, span: Span) -> int:
        return -(-(span[1] - span[0]) // self.length)

    def rest(self, stream: int, segments: int) -> list[Span]:
        """The text that is left of a stream after a number of segments."""
        row = self.rows[stream]
        for number, span in enumerate(row):
            if segments < self._segments(span):
                return [(span[0] + segments * self.length, span[1]), *row[number + 1 :]]
            segments -= self._segments(span)
        return []

    def batches(self, parts: int) -> list[list[int]]:
        """The batches, each with a part of a segment of all streams, in the order in which fairseq distributes them.

        `parts` is the number of processes, times that of batches that each adds up for an update.
        """
        rows = self.streams // parts
        return [list(range(first, first + rows)) for first in range(0, len(self), rows)]

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        sources = [sample["source"] for sample in samples]
        net_input = {
            "src_tokens": self._pad(sources, self.pad),
            "src_lengths": torch.tensor([len(source) for source in sources]),
        }
        if self.carried:
            net_input["continues"] = torch.tensor([sample["continues"] for sample in samples])
        if self.documents is not None:
            net_input["starts"] = self._pad([sample["starts"] for sample in samples], False)
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(len(source) for source in sources),
            "net_input": net_input,
            "target": self._pad([sample["target"] for sample in samples], self.pad),
        }

    @staticmethod
    def _pad(rows: list[Tensor], padding: int) -> Tensor:
        # A stream that has ended keeps its row, all padding, as long as others go on.
        length = max(1, max(len(row) for row in rows))
        return data_utils.collate_tokens(rows, padding, pad_to_length=length)
