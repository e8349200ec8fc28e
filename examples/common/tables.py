"""Tables to look at in a terminal, which are also Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns: the first to the left, the others, of numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(words: Sequence[str]) -> str:
        first, *rest = zip(words, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(word.rjust(width) for word, width in rest)]
        return f"| {' | '.join(padded)} |"

    ruler = line([f"{'-' * (width - (i > 0))}{':' * (i > 0)}" for i, width in enumerate(widths)])
    return "\n".join([line(header), ruler, *map(line, rows)])
