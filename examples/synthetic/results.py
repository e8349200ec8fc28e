"""The finished points: a file of JSON lines for each setting, and tables of their losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common.files import UserError, read_values
from common.tables import format_table

from synthetic.models import MODELS
from synthetic.training import TARGET, Point


@dataclass(frozen=True)
class Result:
    """A line, as `training.train_point` made it; a loss that was not a number is None."""

    point: Point
    best_loss: float | None
    best_step: int
    steps: int
    stopped: str
    curve: list[tuple[int, float | None]]
    seconds: float


def file_of(folder: Path, setting: int) -> Path:
    return folder / f"setting{setting}.jsonl"


def read_results(path: Path) -> dict[str, Result]:
    """Reads a file of results; a half line at its end, which a crash left, is left out.

    Returns the results by their points' keys; none if there is no such file. Lines of a version of this program that
    trained otherwise have other keys than any point has, and are left out. Raises UserError for a line that is no
    result, and for a point that is there twice.
    """
    results: dict[str, Result] = {}
    for number, (key, result) in read_values(path, read_result, "result of a point"):
        if key in results:
            raise UserError(f"{path}, line {number} repeats a point that an earlier line has; remove one of them")
        if key == result.point.key:
            results[key] = result
    return results


def one_of_each_seed(results: Iterable[Result]) -> list[Result]:
    """The results that are compared: of a model, size, seed and evaluation that of most steps, rather on a CPU.

    Both devices begin with the same weights, so that a second one is no other seed.
    """
    worst_first = sorted(results, key=lambda result: (result.point.max_steps, result.point.device == "cpu"))
    chosen = {(r.point.setting, r.point.model_title, r.point.size, r.point.seed): r for r in worst_first}
    return list(chosen.values())


def read_result(value: dict[str, Any]) -> tuple[str, Result]:
    """A line's key and result; may raise as `read_values` says."""
    point = Point(**value["point"])
    if point.model not in MODELS[point.setting]:
        raise ValueError(point.model)
    curve = [(int(step), None if loss is None else float(loss)) for step, loss in value["curve"]]
    best = None if value["best_loss"] is None else float(value["best_loss"])
    steps = int(value["best_step"]), int(value["steps"])
    return value["key"], Result(point, best, *steps, str(value["stopped"]), curve, float(value["seconds"]))


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
