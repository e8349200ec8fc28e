"""Tables to look at in a terminal, which are also Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Cells in columns: the first `left` ones to the left, the others, of numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    sides = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    ruler = ["-" * (width - (i >= left)) + ":" * (i >= left) for i, width in enumerate(widths)]
    lines = ([side(*cell) for side, *cell in zip(sides, row, widths, strict=True)] for row in (header, ruler, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
