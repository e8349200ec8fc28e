"""The end of the demo: a table of perplexities, and the unigram model that they are compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.tables import format_table


@dataclass(frozen=True)
class Scores:
    """A model's numbers; None where there is none.

    `valid`, `sliding`, `carried`: perplexities.
    """

    title: str
    parameters: int
    valid: float
    sliding: float
    carried: float | None = None
    tokens_per_second: float | None = None


class Unigram:
    """Predicts each token by how often it occurs in the training text, whatever comes before.

    `vocabulary`: the words that models know, without fairseq's special symbols. `lines`: the training text. Each type's
    count is raised by 1, so that none has probability 0.
    """

    def __init__(self, vocabulary: Iterable[str], lines: Iterable[str]) -> None:
        self.types = {*vocabulary, "<unk>", "</s>"}
        self.counts = self._count(lines)
        self.total = self.counts.total() + len(self.types)

    def perplexity(self, lines: Iterable[str]) -> float:
        counts = self._count(lines)
        loss = -sum(n * math.log((self.counts[token] + 1) / self.total) for token, n in counts.items())
        return math.exp(loss / counts.total())

    def _count(self, lines: Iterable[str]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line.split())
            counts["</s>"] += 1
        for token in counts.keys() - self.types:
            counts["<unk>"] += counts.pop(token)
        return counts


def format_scores(rows: Sequence[Scores]) -> str:
    """The comparison as a table that is also Markdown."""
    cells = []
    for row in rows:
        carried = "-" if row.carried is None else f"{row.carried:.2f}"
        speed = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        cells.append([row.title, f"{row.parameters:,}", f"{row.valid:.2f}", f"{row.sliding:.2f}", carried, speed])
    return format_table(
        ["model", "parameters", "valid", "test, sliding window", "test, carried over", "tokens/s"], cells
    )
