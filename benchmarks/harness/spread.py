"""Medians with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def summarize(times: Sequence[float]) -> dict[str, float]:
    """Of some measurements: "rounds", "min", "lower" and "upper" quartile, "median".

    Raises:
        ValueError: if there are none.
    """
    if not times:
        raise ValueError("times is empty; there must be one measurement at least")
    if len(times) == 1:
        lower = middle = upper = times[0]
    else:
        lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
    return {"rounds": len(times), "min": min(times), "lower": lower, "median": middle, "upper": upper}
