"""Plots, of training curves and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_curves(trainings: dict[str, dict[str, Any]], top: float, path: Path, **levels: float) -> None:
    """Draws perplexities over updates, of validation (dots) and training text, and saves them as PNG.

    `trainings`: by title, what `fairseq_logs.read_training` returns. `top`: the highest perplexity to show. The first
    updates are on a scale of their own. `path`: of the file. `levels`: perplexities to compare with, by title; drawn as
    level lines.
    """
    figure, axes = new_figure(figsize=(8, 5))
    for title, training in trainings.items():
        [line] = axes.plot(*zip(*training["valid_ppl"], strict=True), marker="o", label=title)
        axes.plot(*zip(*training["train_ppl"], strict=True), color=line.get_color(), alpha=0.4)
    for title, level in levels.items():
        axes.axhline(level, color="grey", linestyle="--", label=title)
    axes.set(xlabel="updates", ylabel="perplexity", yscale="log")
    axes.set_title("Perplexity of the validation text (dots) and the training text (thin lines)")
    axes.set_ylim(top=top)
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save_figure(figure, path)


def new_figure(*panels: int, **settings: Any) -> tuple[Any, Any]:
    """A figure and its axes, without a screen; see `pyplot.subplots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*panels, layout="constrained", **settings)


def plain(axes: Any) -> None:
    """Light lines behind the curves, and no frame above and on the right."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, path: Path) -> None:
    """Saves a PNG whole or not at all, and closes the figure."""
    from matplotlib import pyplot

    new = path.with_name(f"{path.name}.new")
    figure.savefig(new, format="png", dpi=120)
    pyplot.close(figure)
    new.replace(path)
