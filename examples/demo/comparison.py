"""The end of the demo: a table of perplexities and a plot of the training curves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """A model's numbers; None where there is none.

    Attributes:
        valid, sliding, carried: perplexities.
    """

    title: str
    parameters: int
    valid: float
    sliding: float
    carried: float | None = None
    tokens_per_second: float | None = None


class Unigram:
    """Predicts each token by how often it occurs in the training text, whatever comes before.

    Args:
        vocabulary: the words that models know, without fairseq's special symbols.
        lines: the training text. Each type's count is raised by 1, so that none has probability 0.
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


def format_table(rows: Sequence[Row]) -> str:
    """The comparison as a table that is also Markdown."""
    header = ["model", "parameters", "valid", "test, sliding window", "test, carried over", "tokens/s"]
    cells = [
        [
            row.title,
            f"{row.parameters:,}",
            f"{row.valid:.2f}",
            f"{row.sliding:.2f}",
            "-" if row.carried is None else f"{row.carried:.2f}",
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]

    def line(words: Sequence[str]) -> str:
        first, *rest = zip(words, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(word.rjust(width) for word, width in rest)]
        return f"| {' | '.join(padded)} |"

    ruler = line([f"{'-' * (width - (i > 0))}{':' * (i > 0)}" for i, width in enumerate(widths)])
    return "\n".join([line(header), ruler, *map(line, cells)])


def plot_curves(trainings: dict[str, dict[str, Any]], baseline: Row, path: Path) -> None:
    """Draws perplexities over updates, of validation (dots) and training text, and saves them as PNG.

    Args:
        trainings: by title, what `fairseq_logs.read_training` returns.
        baseline: drawn as a level line.
        path: of the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for title, training in trainings.items():
        [line] = axes.plot(*zip(*training["valid_ppl"], strict=True), marker="o", label=title)
        axes.plot(*zip(*training["train_ppl"], strict=True), color=line.get_color(), alpha=0.4)
    axes.axhline(baseline.valid, color="grey", linestyle="--", label=baseline.title)
    axes.set(xlabel="updates", ylabel="perplexity", yscale="log")
    axes.set_title("Perplexity of the validation text (dots) and the training text (thin lines)")
    # The first updates, on a scale of their own, are left out.
    axes.set_ylim(top=2.5 * baseline.valid)
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks("{x:.0f}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    new = path.with_name(f"{path.name}.new")
    figure.savefig(new, format="png", dpi=120)
    pyplot.close(figure)
    new.replace(path)
