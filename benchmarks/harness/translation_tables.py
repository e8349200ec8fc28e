"""The results of translation.py as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.tables import count, markdown, mebibytes, ratio, significant

Record = dict[str, Any]
Row = dict[str, Any]


def render(record: Record) -> str:
    """A table for each beam, one of whole translations, and what was cut."""
    parts = []
    for beam in sorted({row["beam"] for row in record["rows"]}, reverse=True):
        rows = [row for row in record["rows"] if row["beam"] == beam]
        parts.append(f"**Beam {beam}**\n\n{_steps(rows, record['settings'])}")
    parts.append(_whole(record["whole"], record["settings"]))
    parts.append("".join(f"- cut to keep to the budget: {line}\n" for line in record["cut"]))
    return "\n".join(part for part in parts if part)


def _steps(rows: Sequence[Row], settings: dict[str, int]) -> str:
    """Time and memory of the next token by model, source and length, and the Transformer's time over each."""
    base = {(row["source"], row["length"]): row for row in rows if row["model"] == "transformer"}
    models = list(dict.fromkeys(row["model"] for row in rows))
    header = ["model", "source", "tokens before", "median (quartiles), ms", "Transformer over it"]
    header += ["state of a hypothesis", "its encoder output", "peak of all"]
    lines = []
    # All lengths with the one source, then those with a source of their own.
    for row in sorted(rows, key=lambda row: (models.index(row["model"]), row["source"] != settings["source"])):
        lines.append(
            [
                row["model"],
                f"{row['source']:,}",
                f"{row['length']:,}",
                _spread(row["seconds"], 1e3),
                ratio(base[row["source"], row["length"]]["seconds"]["median"] / row["seconds"]["median"]),
                mebibytes(row["state bytes"] / settings["hypotheses"]),
                mebibytes(row["encoder bytes"] / settings["hypotheses"]),
                mebibytes(row["peak bytes"]),
            ]
        )
    return markdown(header, lines)


def _whole(rows: Sequence[Row], settings: dict[str, int]) -> str:
    """Seconds of whole translations, and milliseconds for each of their tokens."""
    [base] = [row["seconds"]["median"] for row in rows if row["model"] == "transformer"]
    lines = []
    for row in rows:
        seconds = row["seconds"]
        lines.append(
            [
                row["model"],
                _spread(seconds, 1),
                significant(seconds["median"] / row["length"] * 1e3),
                ratio(base / seconds["median"]),
            ]
        )
    one = rows[0]
    title = (
        f"**Whole translations, beam {one['beam']}**: {count(settings['hypotheses'] // one['beam'], 'sentence')} of "
        f"{count(one['source'], 'token')}, {count(one['length'], 'token')} each"
    )
    header = ["model", "median (quartiles), s", "ms for a token", "Transformer over it"]
    return f"{title}\n\n{markdown(header, lines)}"


def _spread(seconds: dict[str, float], scale: float) -> str:
    median, lower, upper = (significant(seconds[what] * scale) for what in ("median", "lower", "upper"))
    return f"{median} ({lower} – {upper})"
