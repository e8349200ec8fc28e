"""The finished points in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from common.tables import format_table

from synthetic.models import MODELS
from synthetic.results import Result
from synthetic.training import TARGET


def loss_table(results: Sequence[Result]) -> str:
    """The lowest losses by S and model, as a table that is also Markdown: a row for each S, a column for each model.

    With several seeds a cell is their median, or, where they differ by more than a tenth, their range.
    """
    losses: dict[tuple[str, int], list[float]] = {}
    for result in results:
        cell = losses.setdefault((result.point.model_title, result.point.size), [])
        cell.append(float("nan") if result.best_loss is None else result.best_loss)
    sizes = sorted({size for _, size in losses})
    models = [model for setting in MODELS.values() for model in setting]
    in_order = sorted(results, key=lambda result: (models.index(result.point.model), result.point.evaluate_length))
    titles = dict.fromkeys(result.point.model_title for result in in_order)
    rows = [[str(size), *(_cell(losses.get((title, size), [])) for title in titles)] for size in sizes]
    return format_table(["S", *titles], rows)


def _cell(losses: Sequence[float]) -> str:
    if not losses:
        return ""
    if any(loss != loss for loss in losses):
        return shown_loss(None)
    low, high = min(losses), max(losses)
    if high > 1.1 * max(low, TARGET):
        return f"{shown_loss(low)} to {shown_loss(high)}"
    return shown_loss(median(losses))


def shown_loss(loss: float | None) -> str:
    """A loss for people."""
    if loss is None:
        return "not a number"
    return f"< {TARGET}" if loss < TARGET else f"{loss:.4f}"
