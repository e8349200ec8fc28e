"""Tables in Markdown, and numbers as a reader wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def table(columns: dict[str, Callable[[Any], str]], rows: Sequence[Any], left: int = 1) -> str:
    """A line for each row; `columns` has a cell's text by the column's title."""
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in rows], left)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose first `left` columns are text and whose others are numbers, with its columns aligned."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)])
    lines = []
    for row in cells:
        padded = [cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append(f"| {' | '.join(padded)} |\n")
    return "".join(lines)


def significant(value: float) -> str:
    """Three significant digits, without an exponent between a thousandth and a million."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    return f"{value:{',.0f' if magnitude >= 100 else '.1f' if magnitude >= 10 else '.2f' if magnitude >= 1 else '.3g'}}"


def spread(measured: dict[str, float], scale: float) -> str:
    """Median and quartiles, so many times as large."""
    median, lower, upper = (significant(measured[what] * scale) for what in ("median", "lower", "upper"))
    return f"{median} ({lower} – {upper})"


def milliseconds(seconds: float) -> str:
    return f"{significant(seconds * 1e3)} ms"


def mebibytes(size: float) -> str:
    return f"{significant(size / 2**20)} MiB"


def ratio(value: float) -> str:
    return f"{significant(value)} x"


def share(value: float) -> str:
    return f"{value * 100:.0f}%"


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + "s" * (number != 1)
