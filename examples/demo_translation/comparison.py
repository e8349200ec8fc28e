"""The end of the demo: a table of scores, and translations to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.tables import format_table

EXAMPLES = 3
"""Translations to look at, besides a wrong one."""

# Weights that a layer of fairseq's encoder holds a second time, side by side for a fused kernel.
_COPY = re.compile(r"\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)$")


@dataclass(frozen=True)
class Scores:
    """A model's numbers.

    `bleu`, `signature`: sacrebleu's score of the test text, and how that was computed. `exact`, `lines`: translations
    that are the reference letter for letter, and all of them. `tokens_per_second`: of training.
    `sentences_per_second`: of generation.
    """

    title: str
    parameters: int
    bleu: float
    signature: str
    exact: int
    lines: int
    tokens_per_second: float
    sentences_per_second: float


def format_scores(rows: Sequence[Scores]) -> str:
    """The comparison as a table that is also Markdown."""
    header = ["model", "parameters", "BLEU", "exact matches", "training tokens/s", "generated sentences/s"]
    cells = []
    for row in rows:
        found = [f"{row.parameters:,}", f"{row.bleu:.2f}", f"{row.exact:,} of {row.lines:,}"]
        cells.append([row.title, *found, f"{row.tokens_per_second:,.0f}", f"{row.sentences_per_second:,.0f}"])
    return format_table(header, cells)


def format_examples(source: Sequence[str], reference: Sequence[str], outputs: dict[str, Sequence[str]]) -> str:
    """The first sentences, and another that a model gets wrong, as a Markdown list.

    `source`, `reference`: the test text. `outputs`: the translations, by the title of their model.
    """

    def example(number: int) -> list[str]:
        lines = [f"- {source[number]}", f"  - reference: {reference[number]}"]
        for title, texts in outputs.items():
            wrong = "" if texts[number] == reference[number] else ", wrong"
            lines.append(f"  - {title}{wrong}: {texts[number]}")
        return lines

    lines = ["The first of the test text:", ""]
    for number in range(min(EXAMPLES, len(source))):
        lines += example(number)
    wrong = {title: [n for n, text in enumerate(texts) if text != reference[n]] for title, texts in outputs.items()}
    if not any(wrong.values()):
        return "\n".join([*lines, "", "No translation is wrong."])
    for title, numbers in wrong.items():
        others = [number for number in numbers if number >= EXAMPLES]
        if others:
            return "\n".join([*lines, "", f"One that the {title} gets wrong:", "", *example(others[0])])
    return "\n".join(lines)


def count_copies(checkpoint: Path) -> int:
    """Parameters that fairseq's own encoder layers have twice, which it counts and training leaves alone."""
    from fairseq_fastweights.conversion.weight_files import load_safely

    state = load_safely(checkpoint)["model"]
    return sum(value.numel() for name, value in state.items() if _COPY.search(name))
