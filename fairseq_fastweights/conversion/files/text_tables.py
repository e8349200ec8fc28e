"""Tables in messages and logs."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """Formats rows in columns; with `numbers`, all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
    lines = ("  ".join(side(word, n) for side, word, n in zip(sides, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
