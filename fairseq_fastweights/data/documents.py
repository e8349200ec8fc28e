"""The documents of a corpus, and samples with the places where documents begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fairseq.data import BaseWrapperDataset, MonolingualDataset
from torch import Tensor

from fairseq_fastweights.data.token_corpus import TokenCorpus
from fairseq_fastweights.invalid_input import InvalidInput


class Documents:
    """The places where the documents of a corpus begin.

    Empty lines, which consist of the token that ends the line, separate documents, as in fairseq's
    `--sample-break-mode complete_doc`. This token is the last one to predict of the document before it, and the input
    from which the first word of the next document is predicted. Of several successive empty lines the last ends the
    document.

    Args:
        corpus: the text.

    Attributes:
        bounds: the position of the first token of each, and the number of all tokens.

    Raises:
        ValueError: if there is no empty line.
    """

    def __init__(self, corpus: TokenCorpus) -> None:
        sizes = np.diff(corpus.ends, prepend=0)
        ends = corpus.ends[sizes > 0]
        empty = sizes[sizes > 0] == 1
        if not empty.any():
            raise InvalidInput(
                f"separate_documents is set, but split {corpus.name!r} has no empty line, which ends a document; there "
                "must be at least one, or separate_documents must not be set"
            )
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
        documents: those of the corpus.
    """

    dataset: MonolingualDataset

    def __init__(self, samples: MonolingualDataset, documents: Documents) -> None:
        super().__init__(samples)
        self.documents = documents

    def __getitem__(self, index: int) -> dict[str, Any]:
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
