"""Tables to look at in a terminal, which are also Markdown."""

from __future__ import annotations

import re
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


def read_table(text: str, *columns: str) -> list[dict[str, str]]:
    """The rows, by column, of the first table in a Markdown text that has all of `columns`; [] if there is none."""
    for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()]
        if set(columns) <= set(header):
            return [dict(zip(header, row, strict=True)) for row in rows]
    return []


def number(cell: str) -> float | None:
    """What a cell says, as 8,192 or 1.4e+06; None if it says nothing."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None
