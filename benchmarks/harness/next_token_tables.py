"""The results of generation.py as a table in Markdown."""

from __future__ import annotations

from typing import Any

from harness.tables import markdown, mebibytes, ratio, significant


def render(record: dict[str, Any]) -> str:
    """Time and memory of the next token by model and length, and the Transformer's time over each.

    Expected is what that would be if the Transformer's tokens took longer only by the time that its cache takes to be
    copied and read, and the others' did not take longer. A median beside other lengths is of a stretch without the
    Transformer, in which a model's lengths take turns.
    """
    base = {row["length"]: row for row in record["rows"] if row["model"] == "transformer"}
    fewest = {row["model"]: row["seconds"]["median"] for row in record["rows"] if row["length"] == min(base)}
    header = ["model", "tokens before (first – last timed)", "median (quartiles), ms"]
    header += ["Transformer over it", "expected", "median beside other lengths, ms", "state", "peak"]
    lines = []
    for row in sorted(record["rows"], key=lambda row: list(record["parameters"]).index(row["model"])):
        seconds = row["seconds"]
        quartiles = f"({significant(seconds['lower'] * 1e3)} – {significant(seconds['upper'] * 1e3)})"
        transformer = base[row["length"]]
        moved = transformer["cache seconds"]["median"] - base[min(base)]["cache seconds"]["median"]
        lines.append(
            [
                row["model"],
                f"{row['length']:,} ({row['first']:,} – {row['last']:,})",
                f"{significant(seconds['median'] * 1e3)} {quartiles}",
                ratio(transformer["seconds"]["median"] / seconds["median"]),
                "–" if row is transformer else ratio((fewest["transformer"] + moved) / fewest[row["model"]]),
                "–" if row is transformer else significant(row["seconds beside other lengths"]["median"] * 1e3),
                mebibytes(row["state bytes"]),
                mebibytes(row["peak bytes"]),
            ]
        )
    cut = "".join(f"- cut to keep to the budget: {line}\n" for line in record["cut"])
    return markdown(header, lines) + (f"\n{cut}" if cut else "")
