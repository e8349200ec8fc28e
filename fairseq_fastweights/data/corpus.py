"""A split of a corpus as one long text, its documents, and samples of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fairseq.data import BaseWrapperDataset, Dictionary, FairseqDataset, MonolingualDataset
from torch import Tensor

from fairseq_fastweights.invalid_input import InvalidInput


class TokenCorpus(FairseqDataset):
    """The lines of an indexed data set as one text, which is read on demand.

    Args:
        lines: an indexed data set of one-dimensional token tensors, with `sizes`.
        eos: the input that predicts the first token.
        name: the split's name, for messages.
        output_dictionary: the dictionary of targets; None for all tokens.

    Raises:
        ValueError: if there are no tokens.
    """

    def __init__(self, lines: Any, eos: int, name: str, output_dictionary: Dictionary | None = None) -> None:
        self.lines = lines
        self.eos = eos
        self.name = name
        self.output_dictionary = output_dictionary
        self.ends = np.cumsum(np.asarray(lines.sizes, dtype=np.int64))
        if len(self) == 0:
            raise InvalidInput(f"split {name!r} holds no tokens; it must hold at least one")

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> Tensor:
        return self.read(index, index + 1)

    def load(self) -> None:
        """Loads lines that must be prefetched (--dataset-impl cached, fairseq's default for lazy)."""
        if getattr(self.lines, "supports_prefetch", False):
            self.lines.prefetch(range(len(self.lines)))

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens `start` to `stop` (exclusive), as int64."""
        if stop <= start:
            return torch.empty(0, dtype=torch.int64)
        line = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        while start < stop:
            # Line `line` holds the tokens from ends[line - 1] to ends[line].
            first = int(self.ends[line - 1]) if line else 0
            end = min(stop, int(self.ends[line]))
            if end > start:
                pieces.append(self.lines[line][start - first : end - first].long())
                start = end
            line += 1
        return torch.cat(pieces)

    def read_inputs(self, start: int, stop: int) -> Tensor:
        """The inputs for predicting tokens `start` to `stop` (exclusive): the token before each."""
        if stop <= start:
            return torch.empty(0, dtype=torch.int64)
        if start == 0:
            return torch.cat([torch.tensor([self.eos]), self.read(0, stop - 1)])
        return self.read(start - 1, stop - 1)

    def read_targets(self, start: int, stop: int) -> Tensor:
        """The targets: tokens `start` to `stop` (exclusive), with <unk> for those outside the output dictionary."""
        tokens = self.read(start, stop)
        if self.output_dictionary is None:
            return tokens
        return tokens.masked_fill(tokens >= len(self.output_dictionary), self.output_dictionary.unk())

    def num_tokens(self, index: int) -> int:
        return 1

    def size(self, index: int) -> int:
        return 1


class Documents:
    """The places where the documents of a corpus begin.

    Empty lines, which consist of the token that ends the line, separate documents, as in fairseq's
    `--sample-break-mode complete_doc`. This token is the last target of the document before it, and the input that
    predicts the first token of the next document. If several empty lines follow each other, the last one ends the
    document.

    Args:
        corpus: the text.

    Attributes:
        bounds: the position of the first token of each document, then the number of tokens.

    Raises:
        ValueError: if there is no empty line.
    """

    def __init__(self, corpus: TokenCorpus) -> None:
        # Lines without any token, which some data sets hold, are no empty lines: those have their end token.
        sizes = np.diff(corpus.ends, prepend=0)
        ends = corpus.ends[sizes > 0]
        empty = sizes[sizes > 0] == 1
        if not empty.any():
            raise InvalidInput(
                f"separate_documents is set, but split {corpus.name!r} has no empty line, which ends a document; there "
                "must be at least one, or separate_documents must not be set"
            )
        # A document begins after an empty line that no other empty line follows.
        begins = ends[:-1][empty[:-1] & ~empty[1:]]
        self.bounds: npt.NDArray[np.int64] = np.concatenate([[0], begins, [len(corpus)]]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def starts(self, start: int, stop: int) -> Tensor:
        """Marks the tokens from `start` to `stop` (exclusive) that begin a document: (stop - start,), bool."""
        first, last = np.searchsorted(self.bounds, [start, stop])
        marks = torch.zeros(max(0, stop - start), dtype=torch.bool)
        marks[self.bounds[first:last] - start] = True
        return marks


class PackedDocuments(BaseWrapperDataset):
    """fairseq's samples of a corpus, with ``net_input["starts"]``, (batch, time), true where a document begins.

    Args:
        samples: successive blocks of the corpus, with all of its tokens and no others.
        documents: the documents of the corpus.
    """

    dataset: MonolingualDataset

    def __init__(self, samples: MonolingualDataset, documents: Documents) -> None:
        super().__init__(samples)
        self.documents = documents

    def __getitem__(self, index: int) -> dict[str, Any]:
        # fairseq's TokenBlockDataset knows the place of each sample in the text.
        start, stop = self.dataset.dataset.slice_indices[index].tolist()
        return {**self.dataset[index], "starts": self.documents.starts(start, stop)}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self.dataset.collater(samples)
        if batch:
            starts = torch.zeros_like(batch["net_input"]["src_tokens"], dtype=torch.bool)
            for row, sample in zip(starts, samples, strict=False):  # there may be rows of padding beside
                row[: len(sample["starts"])] = sample["starts"]
            batch["net_input"]["starts"] = starts
        return batch


class SamplesInOrder(FairseqDataset):
    """Samples of a corpus that fairseq reads in the order of the text; the longest has `length` tokens."""

    length: int

    def num_tokens(self, index: int) -> int:
        return self.length

    def size(self, index: int) -> int:
        return self.length

    def ordered_indices(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self))
