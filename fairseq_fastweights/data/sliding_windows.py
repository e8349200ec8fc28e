"""A corpus as overlapping windows, of which only the new tokens at the end are scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fairseq_fastweights.data.corpus import Documents, SamplesInOrder, TokenCorpus
from fairseq_fastweights.invalid_input import InvalidInput


class SlidingWindows(SamplesInOrder):
    """Windows of `context` + `new` tokens, each `new` tokens after the last; every token is scored once.

    The last `new` tokens of a window are scored; the `context` tokens before them are only read. The first window is
    scored whole. ``net_input["last_positions"]`` is the number of positions to score, so that a model can skip its
    output layer for the others.

    Args:
        corpus: the text.
        new: tokens to score in each window.
        context: tokens to read before them.
        documents: the documents of the corpus, each with windows of its own; None for windows over the whole corpus.
    """

    def __init__(self, corpus: TokenCorpus, new: int, context: int, documents: Documents | None = None) -> None:
        if new < 1 or context < 1:
            raise InvalidInput(
                f"tokens_per_sample is {new + context} and context_window {context}; the context must be at least 1 "
                "and shorter than the sample"
            )
        corpus.load()
        self.corpus = corpus
        self.new = new
        self.context = context
        self.length = new + context
        bounds = np.array([0, len(corpus)]) if documents is None else documents.bounds
        # The first windows all begin at the text's start, as long as the context has room: one window holds them.
        # first: tokens in the first window of each text; windows: the number of its windows.
        first = np.minimum(np.diff(bounds), (context // new + 1) * new)
        windows = 1 - (first - np.diff(bounds)) // new
        number = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)  # from 0 in each text
        begin, end, first = (np.repeat(x, windows) for x in (bounds[:-1], bounds[1:], first))
        self.ends = np.minimum(begin + first + number * new, end)
        self.scored_from = np.where(number > 0, begin + first + (number - 1) * new, begin)
        self.starts = np.where(number > 0, self.scored_from - context, begin)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, scored_from, end = (int(x[index]) for x in (self.starts, self.scored_from, self.ends))
        return {
            "id": index,
            "source": self.corpus.read_inputs(start, end),
            "target": self.corpus.read_targets(scored_from, end),
        }

    def batches(self, max_windows: int) -> list[list[int]]:
        """Batches of windows with equal lengths and equal numbers of scored tokens, in order."""
        # One number for each pair of a length and a number of scored tokens.
        kind = (self.ends - self.starts) * (self.length + 1) + self.ends - self.scored_from
        _, first, kind = np.unique(kind, return_index=True, return_inverse=True)
        alike = np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1])
        return [
            windows[i : i + max_windows].tolist()
            for windows in (alike[k] for k in np.argsort(first))
            for i in range(0, len(windows), max_windows)
        ]

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
