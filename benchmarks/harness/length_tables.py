"""The results of training_length.py as a table in Markdown."""

from __future__ import annotations

from typing import Any

from harness.kernel_tables import describe_absent
from harness.tables import markdown, significant


def render(record: dict[str, Any]) -> str:
    """Medians by contestant and length, who took no part, and what was cut."""
    times = {
        (row["implementation"], row["rule"], row["sizes"]["time"]): row["seconds"]["median"]
        for row in record["rows"]
        if row["status"] == "measured"
    }
    lengths = sorted({length for _, _, length in times})
    lines = []
    for implementation, rule in dict.fromkeys((implementation, rule) for implementation, rule, _ in times):
        medians = [times.get((implementation, rule, length)) for length in lengths]
        lines.append(
            [f"{implementation}, {rule}", *("–" if time is None else significant(time * 1e3) for time in medians)]
        )
    parts = [markdown(["ms at T =", *(f"{length:,}" for length in lengths)], lines), describe_absent(record["rows"])]
    parts.append("".join(f"- cut to keep to the budget: {line}\n" for line in record["cut"]))
    return "\n".join(part for part in parts if part)
