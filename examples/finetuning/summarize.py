#!/usr/bin/env python
"""Makes a table, and curves, of what wikitext2.sh left in OUT.

    summarize.py OUT [--markdown FILE] [--figure FILE]

Perplexities of the validation set by update, before the first one and of the test set, of each model that was converted
from the trained Transformer beside the same model from scratch.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.curves import save_figure
from common.fairseq_logs import Training, parse_training
from common.tables import format_table

RULES = ("decay", "gated", "delta", "add")
STARTS = {"converted": "-", "scaled": "--", "scratch": ":"}
"""How a model can begin, and the line that shows it."""
ABSENT = "–"


@dataclass(frozen=True)
class Run:
    """What one model left behind.

    Attributes:
        training: what its log says.
        before: perplexity of the validation set before the first update; of converted models.
        test: perplexity of the test set, once it was scored.
    """

    training: Training
    before: float | None
    test: float | None

    @property
    def curve(self) -> dict[int, float]:
        """Perplexity of the validation set by update."""
        start = {} if self.before is None else {0: self.before}
        return start | self.training.valid


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Table and curves of a Transformer's conversions.")
    parser.add_argument("out", type=Path, metavar="OUT", help="what wikitext2.sh made")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the curves (PNG)")
    options = parser.parse_args(arguments)

    if not options.out.is_dir():
        print(f"summarize.py: there is no folder {options.out}", file=sys.stderr)
        return 1
    runs, problems = read_runs(options.out)
    for problem in problems:
        print(f"summarize.py: {problem}", file=sys.stderr)
    if not runs:
        print(f"summarize.py: {options.out} holds no folder with a training", file=sys.stderr)
        return 1
    table = format_runs(runs)
    print(table)
    if options.markdown:
        options.markdown.write_text(table + "\n", encoding="utf-8")
    if options.figure:
        draw_curves(runs, options.figure)
    return 0


def read_runs(out: Path) -> tuple[dict[str, Run], list[str]]:
    """The models in `out` by name, in the table's order, and what is wrong with their logs."""
    runs, problems = {}, []
    for log in sorted(out.glob("*/train.log"), key=lambda log: _order(log.parent.name)):
        training = parse_training(_text(log))
        if training.parameters is None or not training.valid:
            problems.append(f"{log}: it has no validation in it")
            continue
        if not training.finished:
            problems.append(f"{log}: it is not finished")
        before = re.search(r'"valid_ppl": "([^"]+)"', _text(log.parent / "start.log"))
        test = re.search(r"Perplexity: ([\d.]+)", _text(log.parent / "test.log"))
        if test is None:
            problems.append(f"{log.parent / 'test.log'} has no perplexity in it")
        runs[log.parent.name] = Run(training, before and float(before[1]), test and float(test[1]))
    return runs, problems


def format_runs(runs: dict[str, Run]) -> str:
    """A row for each model; the columns are updates."""
    updates = sorted({update for name, run in runs.items() if name != "source" for update in run.curve if update})
    header = ["model", "start", "parameters", "before", *(f"{update:,}" for update in updates), "test"]
    rows = []
    for name, run in runs.items():
        model, _, start = name.rpartition("-")
        if not model:  # the source: its last perplexity, after updates of its own
            cells = [*[""] * (len(updates) - 1), _number(min(run.training.valid.values()))] if updates else []
            rows.append([name, "", f"{run.training.parameters:,}", "", *cells, _number(run.test)])
            continue
        cells = [_number(run.curve.get(update)) for update in updates]
        parameters = f"{run.training.parameters:,}"
        rows.append([model.replace("-", ", m = "), start, parameters, _number(run.before), *cells, _number(run.test)])
    return format_table(header, rows)


def draw_curves(runs: dict[str, Run], path: Path) -> None:
    """Draws perplexities of the validation set over updates, a panel for each number of features, and saves a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({int(name.split("-")[1]) for name in runs if name != "source"}) or [0]
    figure, panels = pyplot.subplots(
        1, len(sizes), sharey=True, figsize=(4.5 * len(sizes) + 1.5, 4.5), squeeze=False, layout="constrained"
    )
    for axes, size in zip(panels[0], sizes, strict=True):
        for color, rule in enumerate(RULES):
            for start, style in STARTS.items():
                run = runs.get(f"{rule}-{size}-{start}")
                if run is not None:
                    axes.plot(*zip(*sorted(run.curve.items()), strict=True), style, color=f"C{color}", marker=".")
            axes.plot([], [], color=f"C{color}", label=rule)
        for start, style in STARTS.items():
            axes.plot([], [], style, color="black", label=start)
        if "source" in runs:
            level = min(runs["source"].training.valid.values())
            axes.axhline(level, color="grey", linestyle="-.", label="the Transformer")
        axes.set(title=f"m = {size}", xlabel="updates", yscale="log")
        axes.grid(alpha=0.3, which="both")
    for ticks in (panels[0][0].yaxis.set_major_formatter, panels[0][0].yaxis.set_minor_formatter):
        ticks("{x:g}")
    lowest = min(min(run.curve.values()) for run in runs.values())
    panels[0][0].set(ylabel="perplexity of the validation set", ylim=(0.9 * lowest, max(1000, 2 * lowest)))
    figure.legend(*panels[0][-1].get_legend_handles_labels(), loc="outside right upper")
    save_figure(figure, path)


def _order(name: str) -> tuple[int, int, int, str]:
    """The source, then by features, rule and start."""
    rule, _, rest = name.partition("-")
    size, _, start = rest.partition("-")
    known = rule in RULES and size.isdecimal() and start in STARTS
    return (int(size), RULES.index(rule), list(STARTS).index(start), name) if known else (0, 0, 0, name)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f}" if value < 1e4 else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
