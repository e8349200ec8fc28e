"""Figures of a table's results in a ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path

from common.figures import GREY, draw_curves, draw_points, new_figure, plain, plain_numbers, save_figure, say

from papers.language_models import STATE
from papers.ledger import Entry
from papers.report import difference, has_curves, interval, verdict
from papers.rows import Claim, Table

BAND = "Bands and bars are 95% intervals over seeds, by Student's t; what has none was trained with one seed."


def draw_table(name: str, table: Table, entries: Sequence[Entry], folder: Path) -> None:
    """Draws the results of a table: validation by update, the differences that its claims are about, and scores by
    the size of the state.
    """
    found = [entry for entry in entries if entry.table == name]
    if has_curves(found):
        draw_validation(table, found, folder / f"{name}-curves.png")
    if any(claim.minus and difference(claim, found) for claim in table.claims):
        _draw_claims(table.claims, found, folder / f"{name}-claims.png")
    if counted := [entry for entry in found if STATE in entry.scores]:
        _draw_states(table, counted, folder / f"{name}-states.png")


def draw_validation(table: Table, entries: Sequence[Entry], path: Path) -> None:
    """Draws the validation perplexity of each row by update."""
    # A mean of updates that only some seeds have reached would jump.
    curves = {}
    for row in table.rows:
        of_row = [entry for entry in entries if entry.row == row]
        by_update: dict[int, list[float]] = defaultdict(list)
        for entry in of_row:
            for update, perplexity in entry.valid:
                by_update[update].append(perplexity)
        found = {update: interval(values) for update, values in by_update.items() if len(values) == len(of_row)}
        if found:
            known = len(of_row) > 1
            curves[row] = [
                (update, i.mean, i.mean - i.half, i.mean + i.half) if known else (update, i.mean)
                for update, i in sorted(found.items())
            ]
    figure, axes = new_figure(figsize=(8, 4.8))
    ends = {row: curve[-1][1] for row, curve in curves.items()}
    # A model that others start from was trained for longer than there would be room for.
    levels = {row: ends[row] for row in {row.source for row in table.rows.values()} & {*curves}}
    best = min(ends, key=ends.__getitem__)
    among = f"of {len(ends)} models {best} has the lowest" if len(ends) > 1 else f"{best} has this"
    say(figure, f"At the end, {among} validation perplexity: {ends[best]:.2f}", BAND)
    axes.set(xlabel="updates", ylabel="perplexity of the validation set", yscale="log")
    curves = {row: curve for row, curve in curves.items() if row not in levels} or curves
    axes.set_xlim(0, max(curve[-1][0] for curve in curves.values()) * 1.02)
    lowest = min(ends.values())
    # The first validations are far above, and would press the rest together.
    axes.set_ylim(0.95 * lowest, 5 * lowest)
    draw_curves(axes, curves, levels=levels)
    plain_numbers(axes.yaxis)
    save_figure(figure, path)


def _draw_claims(claims: Sequence[Claim], entries: Sequence[Entry], path: Path) -> None:
    """A line for each claim that compares: the difference and its interval, and where it would have to lie."""
    found = [(claim, i) for claim in claims if claim.minus and (i := difference(claim, entries))]
    figure, axes = new_figure(figsize=(8, 1.6 + 0.45 * len(found)))
    held = sum(verdict(claim, entries)[1] == "yes" for claim, _ in found)
    alone = sum(i.half == inf for _, i in found)
    say(
        figure,
        f"Beyond chance, {held} of {len(found)} claims hold" + f"; of {alone} there is one seed" * bool(alone),
        f"Green: the differences of which a claim speaks. {BAND}",
    )
    for place, (_, i) in enumerate(reversed(found)):
        bar = None if i.half == inf else [i.half]
        axes.errorbar([i.mean], [place], xerr=bar, fmt="o", color="black", capsize=3, linewidth=1.4)
    low, high = axes.get_xlim()
    # Models that break down are hundreds of points away from the others, which differ by one.
    far = bool(high - low > 100)
    if far:
        axes.set_xscale("symlog", linthresh=2)
        ticks = [tick for tick in (-1000, -100, -10, -2, 0, 2, 10, 100, 1000) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        low, high = 1.3 * low, 1.3 * high
    low, high = min(low, -0.1 * (high - low)), max(high, 0.1 * (high - low))
    for place, (claim, _) in enumerate(reversed(found)):
        start = low if claim.at_least is None else claim.at_least
        end = high if claim.at_most is None else claim.at_most
        axes.barh([place], [end - start], left=start, height=0.7, color="#009E73", alpha=0.18, linewidth=0)
    axes.set_xlim(low, high)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(len(found)), [claim.text for claim, _ in reversed(found)])
    axes.set_xlabel("difference" + " (logarithmic beyond 2)" * far)
    plain(axes)
    axes.grid(axis="y", visible=False)
    save_figure(figure, path)


def _draw_states(table: Table, entries: Sequence[Entry], path: Path) -> None:
    """The lower one of each row's test perplexities by the size of its state; of rows with one mixer, of the first."""
    points: dict[str, Sequence[float]] = {}
    drawn: set[str] = set()
    for row, of_table in table.rows.items():
        of_row = [entry for entry in entries if entry.row == row]
        mixer = " ".join(of_table.options.split()[:2])
        if not of_row or mixer in drawn:
            continue
        drawn.add(mixer)
        scores = [interval([entry.scores[name] for entry in of_row]) for name in of_row[0].scores if name != STATE]
        best = min(scores, key=lambda score: score.mean)
        bar = [] if best.half == inf else [best.mean - best.half, best.mean + best.half]
        points[row] = (of_row[0].scores[STATE], best.mean, *bar)
    lowest = min(points, key=lambda row: points[row][1])
    figure, axes = new_figure(figsize=(8.6, 4.8))
    say(
        figure,
        f"Of {len(points)} models {lowest} has the lowest perplexity, {points[lowest][1]:.1f}; it keeps "
        f"{points[lowest][0]:,.0f} numbers",
        "One row of each mixer, as it is better: in windows, or with its state carried over from the start of the "
        f"text. {BAND}",
    )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="size of the state after 256 words, in numbers", ylabel="test perplexity (lower is better)")
    sizes = [size for size, *_ in points.values()]
    axes.set_xlim(0.75 * min(sizes), 1.5 * max(sizes))
    draw_points(axes, points)
    plain_numbers(axes.xaxis, base=2)
    save_figure(figure, path)
