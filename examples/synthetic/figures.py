"""Figures 2 to 5 of Schlag et al. (2021), from whatever points are finished."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common.curves import new_figure, save_figure

from synthetic.models import MODELS
from synthetic.results import Result
from synthetic.training import TARGET

SMALLEST = 1e-5
"""Losses are drawn on scales that end here."""


def draw_figures(
    results: Mapping[int, Sequence[Result]], folder: Path, numbers: Collection[int] = (2, 3, 4, 5)
) -> list[Path]:
    """Draws those figures that there are points for.

    `results`: by setting. With several seeds, each is a symbol or a curve of its own. `folder`: for the PNG files.
    `numbers`: which of the paper's figures. Returns the files.
    """
    drawn = []
    for setting, curves_at, figures in ((1, max, (2, 4)), (2, min, (5, 3))):
        # What never was a number has no place on an axis; the table says that it was none.
        # Those that were evaluated on other sequences than they were trained on are in the table alone, too.
        points = [r for r in results.get(setting, ()) if r.best_loss is not None and not r.point.evaluate_length]
        if not points:
            continue
        size = curves_at(result.point.size for result in points)
        at_size = [result for result in points if result.point.size == size]
        if figures[0] in numbers:
            drawn.append(_draw_losses(points, figures[0], setting, folder))
        if figures[1] in numbers:
            drawn.append(_draw_curves(at_size, figures[1], setting, size, folder))
    return sorted(drawn)


def _draw_losses(results: Sequence[Result], number: int, setting: int, folder: Path) -> Path:
    """The lowest evaluation loss of each point, by S."""
    figure, axes = new_figure(figsize=(8, 5.4))
    for index, (name, model) in enumerate(MODELS[setting].items()):
        losses: dict[int, list[float]] = {}
        for result in results:
            if result.point.model == name:
                losses.setdefault(result.point.size, []).append(max(result.best_loss or 0.0, SMALLEST))
        if not losses:
            continue
        # A line through the medians, a symbol for each seed.
        sizes, style = sorted(losses), _style(index)
        axes.plot(sizes, [median(losses[size]) for size in sizes], **style | {"marker": ""})
        points = [(size, loss) for size in sizes for loss in losses[size]]
        axes.plot(*zip(*points, strict=True), **style | {"linestyle": ""}, label=model.title)
    if setting == 2:
        axes.set_yscale("log")
        axes.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("S, the number of keys and of values")
    axes.set_ylabel("lowest evaluation loss")
    what = "capacity (pairs without replacement)" if setting == 1 else "update rules (pairs with replacement)"
    return _save(figure, axes, f"Setting {setting}, {what}", number, folder)


def _draw_curves(results: Sequence[Result], number: int, setting: int, size: int, folder: Path) -> Path:
    """The evaluation loss by step."""
    figure, axes = new_figure(figsize=(8, 5.4))
    names = list(MODELS[setting])
    for result in sorted(results, key=lambda result: names.index(result.point.model)):
        curve = [(step, max(loss, SMALLEST)) for step, loss in result.curve if loss is not None]
        style = _style(names.index(result.point.model)) | {"marker": ""}
        axes.plot(*zip(*curve, strict=True), **style, label=result.point.model_title)
    axes.set_yscale("log")
    axes.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("steps of 32 sequences")
    axes.set_ylabel("evaluation loss")
    return _save(figure, axes, f"Setting {setting}, learning curves for S = {size}", number, folder)


def _style(index: int) -> dict[str, Any]:
    """The same colour and symbol for a model, whichever others are drawn."""
    return {"color": f"C{index}", "marker": "osv^D<>Px"[index % 9], "markersize": 4, "linewidth": 1.2}


def _save(figure: Any, axes: Any, title: str, number: int, folder: Path) -> Path:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    path = folder / f"synthetic-figure{number}.png"
    save_figure(figure, path)
    return path
