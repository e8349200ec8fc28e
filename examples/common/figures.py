"""How figures look: one colour for a model everywhere, names beside lines, and a word for every band and dotted line.

A figure takes four steps: `new_figure`; `say` for the title, which is the figure's message, and the notes, which take
room; `draw_curves` or `draw_points`, once for each of its axes; `save_figure`.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files import write_whole

BLACK, ORANGE, SKY, GREEN = "#000000", "#D98E00", "#3FA3DC", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"
"""Okabe and Ito's, which colour-blind people can tell apart; orange and sky are darker, to be read as text."""

COLOURS = {
    **dict.fromkeys(("softmax", "transformer", "source"), BLACK),
    **dict.fromkeys(("sum", "linear", "linear-transformer", "add"), BLUE),
    **dict.fromkeys(("delta", "delta-network"), VERMILLION),
    "gated": GREEN,
    "window-sum": "#44AA99",
    "decay": ORANGE,
    "retention": PURPLE,
    "mamba": SKY,
    "gated-delta": "#661100",
    "kimi-delta": "#332288",
    "delta-product": "#AA4499",
    "dpfp": "#2A9D8F",
    "favor": "#882255",
    "tanh": "#999933",
    **dict.fromkeys(("local", "linformer", "abc", "transformer-xl"), GREY),
}
"""By model. A longer name, as delta-carried, has the colour of the longest of these that it begins with."""
DASHES = ("-", "--", ":", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 3)))

PLACES = [(right, up) for up in (0, 9, -9, 20, -20, 32, -32) for right in (7, -7)]
"""Where a point's name may stand, in points of its dot; the first are tried first."""

Curve = Sequence[Sequence[float]]
"""Points (x, y), or (x, y, lower, upper) for a band."""


def styles(models: Sequence[str]) -> list[dict[str, Any]]:
    """A colour and dashes for each of the models of a figure; those of one colour have other dashes, in their order."""
    chosen: list[dict[str, Any]] = []
    for model in models:
        words = model.lower().replace(", ", "-").replace(" ", "-").split("-")
        names = ["-".join(words[:count]) for count in range(len(words), 0, -1)]
        colour = next((COLOURS[name] for name in names if name in COLOURS), GREY)
        before = sum(style["color"] == colour for style in chosen)
        chosen.append({"color": colour, "linestyle": DASHES[before % len(DASHES)]})
    return chosen


def new_figure(*panels: int, **settings: Any) -> tuple[Any, Any]:
    """A figure and its axes, without a screen; see `pyplot.subplots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*panels, layout="constrained", **settings)


def draw_curves(
    axes: Any,
    curves: Mapping[str, Curve],
    *,
    labels: Mapping[str, str] | None = None,
    levels: Mapping[str, float] | None = None,
    marker: str = "",
    size: float = 8.5,
) -> None:
    """Draws a line for each model, with its name on the right.

    `axes`: with its scales and limits set, which names and bands do not change. `curves`: by model; where points have a
    lower and an upper end there is a band, which a note of `say` has to explain. `labels`: the text beside a line
    instead of its name; "" for nothing. `levels`: values to compare with, by name; dotted lines. `marker`: of the
    points. `size`: of the letters.
    """
    ends = []
    for (model, curve), style in zip(curves.items(), styles([*curves]), strict=True):
        x, y, *band = zip(*sorted(curve), strict=True)
        axes.plot(x, y, **style, marker=marker or ("o" if len(x) == 1 else ""), markersize=3.5, linewidth=1.6)
        if band:
            axes.fill_between(x, *band, color=style["color"], alpha=0.15, linewidth=0)
        ends.append((x[-1], y[-1], model, style["color"]))
    for name, value in (levels or {}).items():
        axes.axhline(value, color=GREY, linewidth=1, linestyle=":")
        ends.append((axes.get_xlim()[1], value, name, "0.4"))
    plain(axes)
    named = [(x, y, (labels or {}).get(name, name), colour) for x, y, name, colour in ends]
    _label_ends(axes, [end for end in named if end[2]], size)


def draw_points(
    axes: Any, points: Mapping[str, Sequence[float]], *, labels: Mapping[str, str] | None = None, size: float = 8.5
) -> None:
    """Draws a point for each model, with its name beside it.

    `axes`: with its scales set. `points`: by model, (x, y), or (x, y, lower, upper) for a bar from `lower` to `upper`,
    which a note of `say` has to explain. `labels`: see `draw_curves`. `size`: of the letters.
    """
    plain(axes)
    for (x, y, *bar), style in zip(points.values(), styles([*points]), strict=True):
        bars = [[y - bar[0]], [bar[1] - y]] if bar else None
        axes.errorbar([x], [y], bars, fmt="o", color=style["color"], markersize=6, capsize=3, linewidth=1.2)
    axes.figure.draw_without_rendering()  # only then is it known which names overlap
    dots = [axes.transData.transform(point[:2]) for point in points.values()]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    inside = axes.bbox.extents
    for (model, (x, y, *_)), style in zip(points.items(), styles([*points]), strict=True):
        at = {"textcoords": "offset points", "va": "center", "color": style["color"], "fontsize": size}
        text = axes.annotate((labels or {}).get(model, model), (x, y), (0, 0), **at)

        def box_at(place: tuple[int, int], text: Any = text) -> Sequence[float]:
            text.set(position=place, ha="left" if place[0] > 0 else "right")
            return text.get_window_extent().extents

        def covered(place: tuple[int, int], box_at: Callable[..., Sequence[float]] = box_at) -> float:
            box = box_at(place)
            return sum(_shared(box, other) for other in taken) + _outside(box, inside)

        taken.append(box_at(min(PLACES, key=covered)))


def say(figure: Any, message: str, *notes: str) -> None:
    """Writes the figure's message above it, and below it notes: the meaning of bands, the measurement."""
    width = figure.get_figwidth()
    figure.suptitle(textwrap.fill(message, int(9.8 * width)), x=0.01, ha="left", fontsize=12, fontweight="bold")
    if notes:
        text = "\n".join(textwrap.fill(note, int(15.5 * width)) for note in notes)
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color="0.35")


def plain(axes: Any) -> None:
    """Light lines behind the curves, and no frame above and on the right."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_numbers(axis: Any, base: int = 10) -> None:
    """Writes the numbers of a logarithmic axis, as `axes.yaxis`, out; call it when all is drawn.

    `base`: 10, or 2 for sizes that are doubled.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    between = (1,) if base != 10 or high >= 1000 * low else (1, 2, 5) if high >= 10 * low else (1, 1.5, 2, 3, 5, 7)
    axis.set_major_locator(LogLocator(base, between, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")


def save_figure(figure: Any, path: Path) -> None:
    """Saves a PNG whole or not at all, and closes the figure."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    # Without the version of matplotlib in it, the same numbers give the same file.
    figure.savefig(drawn, format="png", dpi=180, metadata={"Software": None}, pil_kwargs={"optimize": True})
    pyplot.close(figure)
    write_whole(path, drawn.getvalue())


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to those wanted that lie `gap` apart, and from `low` to `high` if there is room.

    Nearest by the sum of squares: those that would touch move as a block, to where its members want to be on average.
    """
    # Isotonic regression by pooling adjacent violators: less its gaps, a block's best place is its mean.
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[list[float]] = []  # of the places wanted, less the gaps below them
    for rank, index in enumerate(order):
        blocks.append([wanted[index] - rank * gap])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            above = blocks.pop()
            blocks[-1] += above
    places = [_mean(block) for block in blocks for _ in block]
    top = max(low, high - (len(wanted) - 1) * gap)
    placed = [min(max(place, low), top) + rank * gap for rank, place in enumerate(places)]
    return [placed[order.index(index)] for index in range(len(wanted))]


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]], size: float) -> None:
    """Writes names on the right of the axes, each as near as there is room to where its line ends."""
    axes.figure.draw_without_rendering()  # the size of the axes is known only then
    to_shares = axes.transData + axes.transAxes.inverted()
    # A line that leaves the axes ends at their edge.
    edges = [(x, min(max(y, 0.0), 1.0)) for x, y in (to_shares.transform(end[:2]) for end in ends)]
    gap = 1.3 * size / (axes.bbox.height * 72 / axes.figure.dpi)
    for edge, place, (_, _, label, colour) in zip(
        edges, spread([y for _, y in edges], gap, 0.0, 1.0), ends, strict=True
    ):
        line = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.6,
            "alpha": 0.6,
            "shrinkA": 1,
            "shrinkB": 3,
            "relpos": (0, 0.5),
        }
        at = {"xycoords": "axes fraction", "xytext": (1.03, place), "va": "center", "annotation_clip": False}
        axes.annotate(label, edge, **at, color=colour, fontsize=size, arrowprops=line)


def _shared(box: Sequence[float], other: Sequence[float]) -> float:
    """The area that two boxes (left, bottom, right, top) have in common."""
    wide, high = (min(box[2 + axis], other[2 + axis]) - max(box[axis], other[axis]) for axis in (0, 1))
    return max(wide, 0.0) * max(high, 0.0)


def _outside(box: Sequence[float], frame: Sequence[float]) -> float:
    """The area of a box that lies outside of another."""
    return (box[2] - box[0]) * (box[3] - box[1]) - _shared(box, frame)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
