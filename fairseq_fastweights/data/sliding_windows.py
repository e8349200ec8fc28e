"""A corpus as overlapping windows, of which only the new tokens at the end are scored."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fairseq.data import FairseqDataset

from fairseq_fastweights.data.token_corpus import TokenCorpus


class SlidingWindows(FairseqDataset):
    """Windows of `context` + `new` tokens, each `new` tokens further on; every token is scored once.

    Of a window the last `new` tokens are scored, after `context` tokens that are only read. The first window is
    scored whole. The batch says how many positions are wanted in ``net_input["last_positions"]``, so that a model
    need not compute a softmax over the vocabulary for the others.

    Args:
        corpus: the text.
        new: tokens to score per window.
        context: tokens to read before them.
    """

    def __init__(self, corpus: TokenCorpus, new: int, context: int) -> None:
        if new < 1 or context < 1:
            raise ValueError(
                f"tokens_per_sample is {new + context} and context_window {context}; the context must be at least 1 "
                "and shorter than the sample"
            )
        corpus.load()
        self.corpus = corpus
        self.new = new
        self.context = context
        # As many whole steps as fit into the context all start at the corpus's beginning: one window holds them.
        first = min(len(corpus), (context // new + 1) * new)
        self.ends = np.minimum(np.arange(first, len(corpus) + new, new), len(corpus))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        scored = self._scored(index)
        end = int(self.ends[index])
        start = max(0, end - scored - self.context) if index else 0
        return {
            "id": index,
            "source": self.corpus.read_inputs(start, end),
            "target": self.corpus.read(end - scored, end),
        }

    def batches(self, max_windows: int) -> list[list[int]]:
        """Batches of windows of equal length: the first window, full ones, the last one if it is shorter."""
        windows = len(self)
        full = windows - 1 if windows > 1 and self._scored(windows - 1) < self.new else windows
        edges = [0, *range(1, full, max_windows), full, windows]
        return [list(range(a, b)) for a, b in itertools.pairwise(edges) if b > a]

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        target = torch.stack([sample["target"] for sample in samples])
        source = torch.stack([sample["source"] for sample in samples])
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": target.numel(),
            "net_input": {
                "src_tokens": source,
                "src_lengths": torch.full((len(samples),), source.shape[1]),
                "last_positions": target.shape[1],
            },
            "target": target,
        }

    def num_tokens(self, index: int) -> int:
        return self.new + self.context

    def size(self, index: int) -> int:
        return self.new + self.context

    def ordered_indices(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self))

    def _scored(self, index: int) -> int:
        return int(self.ends[index] - (self.ends[index - 1] if index else 0))
