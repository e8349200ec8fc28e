"""The results of generation.py as a table in Markdown."""

from __future__ import annotations

from typing import Any

from harness.tables import markdown, mebibytes, ratio, significant


def render(record: dict[str, Any]) -> str:
    """Time and memory of the next token by model and length, and the Transformer's time over each."""
    base = {row["length"]: row for row in record["rows"] if row["model"] == "transformer"}
    header = ["model", "tokens before", "median (quartiles), ms", "Transformer over it", "state", "peak"]
    lines = []
    for row in sorted(record["rows"], key=lambda row: list(record["parameters"]).index(row["model"])):
        seconds = row["seconds"]
        quartiles = f"({significant(seconds['lower'] * 1e3)} – {significant(seconds['upper'] * 1e3)})"
        lines.append(
            [
                row["model"],
                f"{row['length']:,}",
                f"{significant(seconds['median'] * 1e3)} {quartiles}",
                ratio(base[row["length"]]["seconds"]["median"] / seconds["median"]),
                mebibytes(row["state bytes"]),
                mebibytes(row["peak bytes"]),
            ]
        )
    cut = "".join(f"- cut to keep to the budget: {line}\n" for line in record["cut"])
    return markdown(header, lines) + (f"\n{cut}" if cut else "")
