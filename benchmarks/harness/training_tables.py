"""The results of training.py as a table in Markdown."""

from __future__ import annotations

from typing import Any

from harness.tables import markdown, ratio, significant

SOFTMAX = "softmax"


def render(record: dict[str, Any]) -> str:
    """Words per second by attention, and over that of softmax."""
    speeds = {row["model"]: row["words per second"] for row in record["rows"]}
    header = ["attention", "words/s (quartiles)", "over softmax"]
    lines = [
        [
            model,
            f"{significant(s['median'])} ({significant(s['lower'])} – {significant(s['upper'])})",
            ratio(s["median"] / speeds[SOFTMAX]["median"]),
        ]
        for model, s in speeds.items()
    ]
    return markdown(header, lines)
