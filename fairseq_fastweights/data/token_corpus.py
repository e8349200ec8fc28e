"""A split of a corpus as one long text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset
from torch import Tensor

from fairseq_fastweights.invalid_input import InvalidInput


class TokenCorpus(FairseqDataset):
    """The lines of an indexed data set as one text, which is read on demand.

    Args:
        lines: an indexed data set of one-dimensional token tensors, with `sizes`.
        eos: the input from which the first token is predicted.
        name: of the split, for messages.
        output_dictionary: of the words that are predicted; None for all.

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
        """Loads lines, if they cannot be read before (--dataset-impl cached, fairseq's default for lazy)."""
        if getattr(self.lines, "supports_prefetch", False):
            self.lines.prefetch(range(len(self.lines)))

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens `start` to `stop` (exclusive), as int64."""
        if stop <= start:
            return torch.empty(0, dtype=torch.int64)
        line = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        while start < stop:
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
