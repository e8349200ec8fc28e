"""Figure 1 of Schlag et al. (2021), the features of DPFP, and Figures 2 to 5, of whatever points are finished."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from common.figures import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    Curve,
    draw_curves,
    new_figure,
    plain_numbers,
    save_figure,
    say,
)
from torch import Tensor

from fairseq_fastweights.mixers.feature_maps import build_feature_map
from synthetic.models import MODELS
from synthetic.results import Result
from synthetic.training import TARGET

SMALLEST = 1e-5
"""Losses are drawn on scales that end here."""
POINTS = 41
"""On each axis of the surfaces, 0 among them."""
LEVELS = {f"solved, training ends: {TARGET:g}": TARGET, "nothing retrieved: 0.5": 0.5}
MESSAGES = {
    2: "A memory fills up: the more features its keys have, the more pairs it holds",
    3: "Replacing values: the delta rule learns it, the sum rule does not",
    4: "Learning {size} pairs: more training does not help a memory that is full",
    5: "Replacing values: the sum rule never learns it, the delta rule until it is full",
}


def draw_figures(
    results: Mapping[int, Sequence[Result]], folder: Path, numbers: Collection[int] = (2, 3, 4, 5)
) -> list[Path]:
    """Draws those figures that there are points for.

    `results`: by setting. With several seeds, lines go through their medians, and bands span them. `folder`: for the
    PNG files. `numbers`: which of the paper's figures. Returns the files.
    """
    drawn = []
    for setting, curves_at, figures in ((1, max, (2, 4)), (2, min, (5, 3))):
        # A loss that never was a number has no place on an axis; the table names it.
        # Those that were evaluated on other sequences than they were trained on are in the table alone, too.
        points = [r for r in results.get(setting, ()) if r.best_loss is not None and not r.point.evaluate_length]
        if not points:
            continue
        # Learning curves are drawn where a setting is hardest (1), or easiest (2).
        size = curves_at(result.point.size for result in points)
        for number in set(figures) & set(numbers):
            path = folder / f"synthetic-figure{number}.png"
            _draw(number, setting, size, points, path)
            drawn.append(path)
    return sorted(drawn)


def _draw(number: int, setting: int, size: int, results: Sequence[Result], path: Path) -> None:
    """The lowest losses by size (Figures 2 and 5), or the learning curves at one size (3 and 4)."""
    figure, axes = new_figure(figsize=(8.6, 4.8))
    by_size = number in (2, 5)
    ylabel = "lowest evaluation loss" if by_size else f"evaluation loss, S = {size}"
    axes.set(xlabel="S, the number of keys, and of values" if by_size else "training steps, of 32 sequences each")
    axes.set(ylabel=ylabel, yscale="linear" if number == 2 else "log")
    curves = (_lowest_losses if by_size else _learning_curves)(setting, size, results)
    labels = {name: _title(setting, name) for name in curves}
    notes = [
        f"Setting {setting}: "
        + ("each key is written once." if setting == 1 else "keys are written again, with new values.")
    ]
    if len({result.point.seed for result in results}) > 1:
        ended = "" if by_size else " Trainings that have ended count with their last losses."
        notes.append(f"Lines go through the medians of the seeds, bands span them.{ended}")
    say(figure, MESSAGES[number].format(size=size), *notes)
    # Levels below all curves would only stretch the scale.
    lowest = min(low for curve in curves.values() for _, _, low, _ in curve)
    levels = {label: level for label, level in LEVELS.items() if level >= lowest}
    draw_curves(axes, curves, labels=labels, levels=levels, marker="o" if by_size else "")
    if number != 2:
        plain_numbers(axes.yaxis)
    save_figure(figure, path)


def _lowest_losses(setting: int, _: int, results: Sequence[Result]) -> dict[str, Curve]:
    """For each model, the lowest losses at each size."""
    losses: dict[str, dict[int, list[float]]] = {name: {} for name in MODELS[setting]}
    for result in results:
        losses[result.point.model].setdefault(result.point.size, []).append(result.best_loss or 0.0)
    return {name: [_of_seeds(*each) for each in sizes.items()] for name, sizes in losses.items() if sizes}


def _learning_curves(setting: int, size: int, results: Sequence[Result]) -> dict[str, Curve]:
    """For each model, the losses of the trainings at each step: the last losses of those that have ended."""
    curves = {}
    for name in MODELS[setting]:
        mine = [r.curve for r in results if (r.point.model, r.point.size) == (name, size)]
        trainings = [[(step, loss) for step, loss in curve if loss is not None] for curve in mine]
        curves[name] = [
            _of_seeds(
                step, [max(t for t in training if t[0] <= step)[1] for training in trainings if training[0][0] <= step]
            )
            for step in sorted({step for training in trainings for step, _ in training})
        ]
    return {name: curve for name, curve in curves.items() if curve}


def _of_seeds(x: int, losses: Sequence[float]) -> tuple[float, float, float, float]:
    """A point of a curve with a band, which spans the seeds."""
    drawn = [max(loss, SMALLEST) for loss in losses]
    return x, median(drawn), min(drawn), max(drawn)


def _title(setting: int, name: str) -> str:
    """A model's name, with the number of features of a key where the setting is about that."""
    model = MODELS[setting][name]
    told = setting == 2 or model.memory == "softmax" or "features" in model.title
    return model.title if told else f"{model.title}, {model.build().features} features"


def dpfp_surfaces() -> tuple[Tensor, Tensor, Tensor]:
    """The grid of k_1 and k_2 from -1 to 1, (points, points) each, and the features there, (4, points, points).

    They are those of Eq. 33 to 36 in the order of Eq. 37: r(k_1) r(-k_2), r(k_2) r(k_1), r(-k_1) r(k_2) and
    r(-k_2) r(-k_1).
    """
    axis = torch.linspace(-1, 1, POINTS)
    first, second = torch.meshgrid(axis, axis, indexing="xy")
    k = torch.stack([first, second], dim=-1).view(1, -1, 1, 2)
    _, features = build_feature_map("dpfp", num_heads=1, head_dim=2, dpfp_nu=1)(k, k)
    return first, second, features.view(POINTS, POINTS, 4).permute(2, 0, 1)


def draw_features(folder: Path) -> Path:
    """Draws the four surfaces into a PNG file in a folder; returns the file."""
    figure, axes = new_figure(figsize=(6.4, 5.4), subplot_kw={"projection": "3d"})
    first, second, features = dpfp_surfaces()
    for surface, colour in zip(features, (BLUE, ORANGE, GREEN, PURPLE), strict=True):
        shown = surface.masked_fill((surface == 0) & (features != 0).any(dim=0), float("nan"))  # where another is above
        axes.plot_surface(first.numpy(), second.numpy(), shown.numpy(), color=colour, linewidth=0, alpha=0.9)
    axes.set(xlabel="k₁", ylabel="k₂", zlabel="feature", xticks=(-1, 0, 1), yticks=(-1, 0, 1), zticks=(0, 0.5, 1))
    axes.view_init(elev=28, azim=-55)
    message = "DPFP divides the plane: a key of two numbers has one feature of four above zero"
    say(figure, message, "Each colour is a feature of DPFP-1; the other three are 0 there.")
    path = folder / "synthetic-figure1.png"
    save_figure(figure, path)
    return path
