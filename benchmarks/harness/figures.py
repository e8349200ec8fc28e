"""Figures of records, in the style of all figures (examples/common/figures.py)."""

from pathlib import Path
from typing import Any

from common.figures import draw_curves, new_figure, plain_numbers, save_figure, say

SHOWN = "delta"  # the rules' lines would lie on top of one another
IMPLEMENTATIONS = {
    "native": "compiled kernel",
    "chunkwise": "PyTorch code",
    "SDPA": "torch's SDPA",
    "causal_product": "pytorch-fast-transformers",
}


def draw_next_token(record: dict[str, Any], path: Path) -> None:
    """Time and peak memory of a decode step against the number of tokens before it (Mao 2022, Fig. 1)."""
    rules = [model for model in record["parameters"] if model != "transformer"]
    shown = SHOWN if SHOWN in rules else rules[0]
    times = {model: _curve(record, model, lambda row: _milliseconds(row["seconds"])) for model in record["parameters"]}
    sizes = {model: _curve(record, model, lambda row: [row["peak bytes"] / 2**20]) for model in record["parameters"]}
    others = [rule for rule in rules if rule != shown]
    # The rule that is drawn stands for all: the text says how far the others are from it.
    most = max(
        abs(theirs[1] / ours[1] - 1)
        for curves in (times, sizes)
        for rule in others or [shown]
        for theirs, ours in zip(curves[rule], curves[shown], strict=True)
    )
    settings, where = record["settings"], "a GPU" if record["device"] == "cuda" else f"{record['threads']} CPU threads"
    figure, (left, right) = new_figure(1, 2, figsize=(9.4, 4))
    say(
        figure,
        "With a fast weight memory the next token costs the same, however long the text",
        f"Language models of {settings['layers']} layers, width {settings['width']}, for {settings['batch']} texts at "
        f"once, on {where}. Bands: the middle half of the measurements. The memory is written by the {shown} rule"
        + (f"; {' and '.join(others)}, not drawn, are within {100 * most:.0f}% of it." if others else "."),
    )
    for axes, curves, unit, title in (
        (left, times, "ms", "time of the next token"),
        (right, sizes, "MiB", "peak memory beside the weights"),
    ):
        axes.set(xlabel="tokens of the text so far", ylabel="milliseconds" if unit == "ms" else "MiB", title=title)
        axes.set_ylim(0, 1.08 * max(point[-1] for point in curves["transformer"]))
        drawn = {model: curves[model] for model in ("transformer", shown)}
        names = {"transformer": "attention:\n", shown: "fast weight\nmemory: "}
        labels = {model: f"{names[model]}{curve[-1][1]:,.0f} {unit}" for model, curve in drawn.items()}
        draw_curves(axes, drawn, labels=labels, marker="o", size=9.5)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    save_figure(figure, path)


def draw_training_length(record: dict[str, Any], path: Path) -> None:
    """Time of forward and backward against the length of a text, for a constant number of tokens."""
    rows = sorted((row for row in record["rows"] if row["status"] == "measured"), key=lambda row: row["sizes"]["time"])
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        name = f"{row['rule']}, {IMPLEMENTATIONS.get(row['implementation'], row['implementation'])}"
        curves.setdefault(name, []).append([row["sizes"]["time"], *_milliseconds(row["seconds"])])
    figure, axes = new_figure(figsize=(9, 5.4))
    settings, where = record["settings"], "a GPU" if record["device"] == "cuda" else f"{record['threads']} CPU threads"
    say(
        figure,
        "Training on the same number of tokens: only attention slows down as texts get longer",
        f"Forward and backward of {settings['tokens']:,} tokens in all, as many short texts or few long ones; "
        f"{settings['heads']} heads of {settings['key_dim']}, {settings['dtype']}, on {where}. "
        "Bands: the middle half of the measurements.",
    )
    axes.set(xlabel="length of each text, in tokens", ylabel="milliseconds", yscale="log")
    axes.set_xscale("log", base=2)
    draw_curves(axes, curves, marker="o")
    plain_numbers(axes.xaxis, base=2)
    plain_numbers(axes.yaxis)
    save_figure(figure, path)


def _curve(record: dict[str, Any], model: str, measure: Any) -> list[list[float]]:
    """The points of a model: length and `measure` of each row."""
    return [[row["length"], *measure(row)] for row in record["rows"] if row["model"] == model]


def _milliseconds(seconds: dict[str, float]) -> list[float]:
    """The median and the quartiles."""
    return [1e3 * seconds[name] for name in ("median", "lower", "upper")]
