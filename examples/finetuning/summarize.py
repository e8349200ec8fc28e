#!/usr/bin/env python
"""Makes a table, and curves, of what wikitext2.sh left in OUT.

    summarize.py OUT [--markdown FILE] [--figure FILE]
    summarize.py PAGE --figure FILE

The table has a row for each model that was converted from the trained Transformer, and for the same model from scratch:
perplexities of the validation set before training and by update, and of the test set. PAGE is a file in Markdown with
such a table, as docs/results.md.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import figures
from common.fairseq_logs import parse_training
from common.summaries import ABSENT, Run, fail, summarize, summary_parser
from common.tables import format_table, number, read_table

RULES = ("decay", "gated", "delta", "add", "linear")
STARTS = ("converted", "scaled", "aligned", "scratch")
"""How a model can begin."""
SCRATCH = " from scratch"


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
    if options.out.is_file():
        if options.markdown or not options.figure:
            parser.error(f"{options.out} is a page, of which only --figure can be drawn")
        table = options.out.read_text(encoding="utf-8")
    else:
        table = format_runs(summarize(options, find_runs, "a training", format_runs))
    if options.figure:
        rows = read_table(table, "model", "start", "before", "test")
        if not rows:
            fail(f"{options.out} holds no table of conversions")
        draw_curves(rows, options.figure)
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


def draw_curves(rows: list[dict[str, str]], path: Path) -> None:
    """Draws perplexities of the validation set over updates, a panel for each size of keys, and saves a PNG."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    levels = {}
    for row in rows:
        name, _, size = row["model"].partition(", m = ")
        cells = [(number(update.replace("before", "0")), number(cell)) for update, cell in row.items()]
        curve = [(update, value) for update, value in cells if update is not None and value is not None]
        if not row["start"]:
            levels["the Transformer"] = curve[-1][1]
        elif curve:
            start = {"converted": "", "scratch": SCRATCH}.get(row["start"], f", {row['start']}")
            panels.setdefault(f"keys of {size} dimensions", {})[f"{name}{start}"] = curve
    ends = {panel: {name: curve[-1][1] for name, curve in curves.items()} for panel, curves in panels.items()}
    ahead = all(
        end[f"{name}{SCRATCH}"] > end[name] for end in ends.values() for name in end if f"{name}{SCRATCH}" in end
    )
    figure, axes = figures.new_figure(1, len(panels), sharey=True, figsize=(4 * len(panels) + 1.6, 5), squeeze=False)
    figures.say(
        figure,
        "Converted from a trained Transformer, a model is far ahead of the same model from scratch"
        if ahead
        else "Validation perplexity of models that were converted from a Transformer, and of the same from scratch",
        "One seed. Converted models start with the Transformer's weights; those called scaled keep the scale of its "
        "attention. Lines that come from above start at higher perplexities than the figure shows.",
    )
    lowest = min([*levels.values(), *(min(end.values()) for end in ends.values())])
    for panel, (title, curves) in zip(axes[0], panels.items(), strict=True):
        panel.set(title=title, xlabel="updates", yscale="log", ylim=(0.85 * lowest, max(1000, 2 * lowest)))
        last = panel is axes[0][-1]  # which has the names, as the colours are the same
        labels = None if last else dict.fromkeys([*curves, *levels], "")
        figures.draw_curves(panel, curves, labels=labels, levels=levels, marker="o")
        figures.plain_numbers(panel.yaxis)
    axes[0][0].set_ylabel("perplexity of the validation set (lower is better)")
    figures.save_figure(figure, path)


def _order(name: str) -> tuple[int, int, int, str]:
    """The source, then by features, rule and start."""
    rule, _, rest = name.partition("-")
    size, _, start = rest.partition("-")
    known = rule in RULES and size.isdecimal() and start in STARTS
    return (int(size), RULES.index(rule), STARTS.index(start), name) if known else (0, 0, 0, name)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f}" if value < 1e4 else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
