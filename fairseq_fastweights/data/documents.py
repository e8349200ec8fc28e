"""The documents of a corpus: where they begin, and samples that say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fairseq.data import BaseWrapperDataset, MonolingualDataset
from torch import Tensor

from fairseq_fastweights.data.token_corpus import TokenCorpus


class Documents:
    """Where the documents of a corpus begin.

    They are what fairseq means by them in `--sample-break-mode complete_doc`: empty lines separate them, lines of a
    single token, which ends the line. That token still belongs to the document before it, which it ends, where it is
    predicted; the next document reads it in order to predict its own first word, as it reads `</s>` where it stands
    alone. Of several empty lines side by side the last ends the document.

    Args:
        corpus: the text.

    Attributes:
        bounds: the first token of each, and the number of all tokens.

    Raises:
        ValueError: if there is no empty line.
    """

    def __init__(self, corpus: TokenCorpus) -> None:
        sizes = np.diff(corpus.ends, prepend=0)
        ends = corpus.ends[sizes > 0]
        empty = sizes[sizes > 0] == 1
        if not empty.any():
            raise ValueError(
                f"separate_documents is set, but split {corpus.name!r} has no empty line, which ends a document; there "
                "must be at least one, or separate_documents must not be set"
            )
        begins = ends[:-1][empty[:-1] & ~empty[1:]]
        self.bounds: npt.NDArray[np.int64] = np.concatenate([[0], begins, [len(corpus)]]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def starts(self, start: int, stop: int) -> Tensor:
        """Which of the tokens `start` to `stop` (exclusive) begin a document: (stop - start,), bool."""
        first, last = np.searchsorted(self.bounds, [start, stop])
        marks = torch.zeros(max(0, stop - start), dtype=torch.bool)
        marks[self.bounds[first:last] - start] = True
        return marks


class PackedDocuments(BaseWrapperDataset):
    """fairseq's samples of a corpus, with where documents begin in ``net_input["starts"]``, (batch, time), bool.

    Args:
        samples: blocks of the corpus as it stands, without more tokens or fewer.
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
