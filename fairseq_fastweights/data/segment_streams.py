"""A corpus as parallel streams, each read segment after segment: what a model with carried-over state is fed."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from fairseq.data import FairseqDataset, data_utils, iterators
from torch import Tensor

from fairseq_fastweights.data.documents import Documents
from fairseq_fastweights.data.token_corpus import TokenCorpus

logger = logging.getLogger(__name__)


class SegmentStreams(FairseqDataset):
    """Cuts a corpus into `streams` contiguous parts of equal length (to one token), and these into segments.

    Batch i holds segment i of every stream, so that row b of a batch continues row b of the batch before, from the
    second batch on; the batch says so in ``net_input["continues"]``. Over all streams every token is predicted once.
    Where documents begin is in ``net_input["starts"]``, (batch, time), bool, if they are given.

    Args:
        corpus: the text.
        streams: how many streams, over all processes; process p of n has the p-th n-th of them.
        segment_length: tokens to a segment.
        pad: the padding symbol, for the ends of streams that are one token shorter than others.
        documents: those of the corpus, if they are to be told apart.

    Raises:
        ValueError: if there are more streams than tokens, or the segment length is not positive.
    """

    def __init__(
        self, corpus: TokenCorpus, streams: int, segment_length: int, pad: int, documents: Documents | None = None
    ) -> None:
        if segment_length < 1:
            raise ValueError(f"tokens_per_sample is {segment_length}; it must be at least 1")
        if not 1 <= streams <= len(corpus):
            raise ValueError(
                f"the batch size times the number of processes is {streams}, but split {corpus.name!r} has "
                f"{len(corpus)} tokens: there must be from 1 to {len(corpus)} streams"
            )
        corpus.load()
        self.corpus = corpus
        self.streams = streams
        self.segment_length = segment_length
        self.pad = pad
        self.documents = documents
        self.bounds = [len(corpus) * i // streams for i in range(streams + 1)]
        longest = max(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        self.segments = -(-longest // segment_length)

    def __len__(self) -> int:
        return self.segments * self.streams

    def __getitem__(self, index: int) -> dict[str, Any]:
        segment, stream = divmod(index, self.streams)
        start = self.bounds[stream] + segment * self.segment_length
        stop = min(start + self.segment_length, self.bounds[stream + 1])
        sample = {
            "id": index,
            "source": self.corpus.read_inputs(start, stop),
            "target": self.corpus.read_targets(start, stop),
            "continues": segment > 0,
        }
        if self.documents is not None:
            sample["starts"] = self.documents.starts(start, stop)
        return sample

    def batches(self, shards: int) -> list[list[int]]:
        """The batches of all processes, in the order in which fairseq deals them out to `shards` processes."""
        rows = self.streams // shards
        return [list(range(first, first + rows)) for first in range(0, len(self), rows)]

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        sources = [sample["source"] for sample in samples]
        net_input = {
            "src_tokens": self._pad(sources, self.pad),
            "src_lengths": torch.tensor([len(source) for source in sources]),
            "continues": torch.tensor([sample["continues"] for sample in samples]),
        }
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

    def num_tokens(self, index: int) -> int:
        return self.segment_length

    def size(self, index: int) -> int:
        return self.segment_length

    def ordered_indices(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self))


class Carrier(Protocol):
    """A model that carries states from segment to segment."""

    def carried_states(self) -> list[dict[str, Tensor]]:
        """What the next segments start from, layer by layer: tensors (rows, ...), on the CPU; empty for nothing."""
        ...

    def restore_carried_states(self, states: list[dict[str, Tensor]]) -> None:
        """Lets the next segments start from such states."""
        ...


class SegmentIterator(iterators.EpochBatchIterator):
    """fairseq's iterator over `SegmentStreams`, whose place in mid-epoch, as checkpoints keep it, has the states there.

    One process writes fairseq's checkpoints, the first: what the others carry is not kept.

    Args:
        streams: the segments.
        carrier: the model that reads them in training; None where nothing is to be resumed.
        others: fairseq's.
    """

    def __init__(self, streams: SegmentStreams, carrier: Carrier | None, **others: Any) -> None:
        super().__init__(dataset=streams, collate_fn=streams.collater, disable_shuffling=True, **others)
        self._carrier = carrier
        # With any of these other than before, a row goes on elsewhere in the text than where its state was left.
        self._layout = {
            "tokens": len(streams.corpus),
            "streams": streams.streams,
            "processes": self.num_shards,
            "tokens per sample": streams.segment_length,
        }

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._carrier is not None and state["iterations_in_epoch"] > 0:
            state["carried_states"] = {"layout": self._layout, "states": self._carrier.carried_states()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        carried = state_dict.get("carried_states")
        if self._carrier is None or carried is None or self.shard_id > 0:
            return
        if carried["layout"] == self._layout:
            self._carrier.restore_carried_states(carried["states"])
        else:
            was, now = (", ".join(f"{x} {name}" for name, x in y.items()) for y in (carried["layout"], self._layout))
            logger.warning("the checkpoint's states are left out: they are of %s, now there are %s", was, now)
