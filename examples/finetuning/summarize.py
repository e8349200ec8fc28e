#!/usr/bin/env python
"""Makes a table, and curves, of what wikitext2.sh left in OUT.

    summarize.py OUT [--markdown FILE] [--figure FILE]

Perplexities of the validation set by update, before the first one and of the test set, of each model that was converted
from the trained Transformer beside the same model from scratch.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.fairseq_logs import parse_training
from common.figures import new_figure, save_figure
from common.summaries import ABSENT, Run, summarize, summary_parser
from common.tables import format_table

RULES = ("decay", "gated", "delta", "add", "linear")
STARTS = {"converted": "-", "scaled": "--", "aligned": "-.", "scratch": ":"}
"""How a model can begin, and the line that shows it."""


@dataclass
class ScoredRun(Run):
    """What one model left behind: perplexity of the validation set `before` training, of converted models, and of the
    `test` set, once it was scored; and how many updates attention was `transferred` for before that."""

    before: float | None = None
    test: float | None = None
    transferred: int = 0

    @property
    def curve(self) -> dict[int, float]:
        """Perplexity of the validation set by update, those of the attention transfer counted."""
        start = {} if self.before is None else {0: self.before}
        return {self.transferred + update: value for update, value in (start | self.training.valid).items()}

    @property
    def missing(self) -> bool:
        return self.training.parameters is None or not self.training.valid


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = summary_parser("Table and curves of a Transformer's conversions.", "OUT", "what wikitext2.sh made")
    options = parser.parse_args(arguments)
    runs = summarize(options, find_runs, "a training", format_runs)
    if options.figure:
        draw_curves({run.name: run for run in runs if not run.missing}, options.figure)
    return 0


def find_runs(out: Path) -> list[ScoredRun]:
    """The models in `out`, in the table's order."""
    return [read_run(log) for log in sorted(out.glob("*/train.log"), key=lambda log: _order(log.parent.name))]


def read_run(log: Path) -> ScoredRun:
    run = ScoredRun(log.parent.name, parse_training(_text(log)))
    if run.missing:
        run.problems.append(f"{log}: it has no validation in it")
        return run
    if not run.training.finished:
        run.problems.append(f"{log}: it is not finished")
    before = re.search(r'"valid_ppl": "([^"]+)"', _text(log.parent / "start.log"))
    test = re.search(r"Perplexity: ([\d.]+)", _text(log.parent / "test.log"))
    if test is None:
        run.problems.append(f"{log.parent / 'test.log'} has no perplexity in it")
    transferred = re.findall(r'"train_num_updates": "(\d+)"', _text(log.parent / "aligned.log"))
    run.transferred = int(transferred[-1]) if transferred else 0
    run.before, run.test = before and float(before[1]), test and float(test[1])
    return run


def format_runs(found: list[ScoredRun]) -> str:
    """A row for each model; the columns are updates."""
    runs = [run for run in found if not run.missing]
    updates = sorted({update for run in runs if run.name != "source" for update in run.curve if update})
    header = ["model", "start", "parameters", "before", *(f"{update:,}" for update in updates), "test"]
    rows = []
    for run in runs:
        model, _, start = run.name.rpartition("-")
        cells = [_number(run.curve.get(update)) for update in updates]
        if not model:  # the source: its last perplexity, after updates of its own
            model, start = start, ""
            cells = [*[""] * (len(updates) - 1), _number(min(run.training.valid.values()))] if updates else []
        before = _number(run.curve.get(0)) if start else ""
        rows.append(
            [model.replace("-", ", m = "), start, f"{run.training.parameters:,}", before, *cells, _number(run.test)]
        )
    return format_table(header, rows)


def draw_curves(runs: dict[str, ScoredRun], path: Path) -> None:
    """Draws perplexities of the validation set over updates, a panel for each number of features, and saves a PNG."""
    sizes = sorted({int(name.split("-")[1]) for name in runs if name != "source"}) or [0]
    figure, panels = new_figure(1, len(sizes), sharey=True, figsize=(4.5 * len(sizes) + 1.5, 4.5), squeeze=False)
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
