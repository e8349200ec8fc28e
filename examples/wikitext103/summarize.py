#!/usr/bin/env python
"""Makes a table, and curves, of what wikitext2.sh, or ../reproduce.py for rows of the papers' tables, left in OUT.

    summarize.py OUT [MODEL ...] [--markdown FILE] [--figure FILE] [--state-figure FILE]
    summarize.py PAGE --state-figure FILE

OUT has one folder for each model, with train.log and the logs of evaluations in it, and what speed.py measured. Scores
of a checkpoint other than the best one have a column of their own. Without MODEL all models are listed, and those that
wikitext2.sh would have made besides. PAGE is a file in Markdown with such a table, as docs/results.md.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import summaries
from common.figures import draw_points, new_figure, plain_numbers, save_figure, say
from common.tables import format_table, number, read_table

WIKITEXT2 = (
    *("softmax", "sum", "delta", "delta-no-positions", "sum-carried", "delta-carried"),
    *("gated", "decay", "retention", "gated-delta", "kimi-delta", "delta-product"),
    *("local", "linformer", "abc", "mamba", "transformer-xl-carried"),
)
EVALUATIONS = {
    # log: column. wikitext2.sh scores the test set only, and does not name it. A checkpoint that is not the best one
    # comes after a dot in the log's name.
    "sliding-valid": "valid, sliding",
    "carried-valid": "valid, carried over",
    "context-0-valid": "valid, context 0",
    "context-480-valid": "valid, context 480",
    "sliding-test": "test, sliding",
    "sliding": "test, sliding",
    "carried-test": "test, carried over",
    "carried": "test, carried over",
    "context-0-test": "test, context 0",
    "context-480-test": "test, context 480",
    **{
        f"memory-{memory}-{target}-{split}": f"{split}, memory {memory}, target {target}"
        for memory, target in ((15, 1), (64, 64), (128, 128), (384, 384))
        for split in ("valid", "test")
    },
}
MEASURED = {"state": "state", "training": "trained words/s", "generation": "generated words/s"}
"""What speed.py measured: column."""
POINTS = {"test, sliding", "test, carried over"}
"""The columns of which the figure of states shows the lower one."""


@dataclass
class ScoredRun(summaries.Run):
    """What the logs of one model say.

    `scores`: perplexity by column of the table. `measured`: what speed.py wrote, by its names.
    """

    scores: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = summaries.summary_parser("Table and curves of trained language models.")
    parser.add_argument("--state-figure", type=Path, metavar="FILE", help="draw perplexity over state size (PNG)")
    options = parser.parse_args(arguments)
    if options.out.is_file():
        if options.figure or options.markdown or options.models or not options.state_figure:
            parser.error(f"{options.out} is a page, of which only --state-figure can be drawn")
        table = options.out.read_text(encoding="utf-8")
    else:

        def find(out: Path) -> list[ScoredRun]:
            return [read_run(out / name) for name in options.models or find_models(out)]

        runs = summaries.summarize(options, find, "the log of a training", format_runs)
        if options.figure:
            summaries.draw_curves(runs, options.figure, "perplexity")
        table = format_runs(runs)
    if options.state_figure:
        points = read_points(table)
        if not points:
            summaries.fail(f"{options.out} holds no model that is both scored and measured")
        draw_states(points, options.state_figure)
    return 0


def find_models(out: Path) -> list[str]:
    """The folders in `out` that hold a training; if wikitext2.sh made one of them, all that it makes."""
    found = sorted(log.parent.name for log in out.glob("*/train.log"))
    if not set(found) & set(WIKITEXT2):
        return found
    return [*WIKITEXT2, *(name for name in found if name not in WIKITEXT2)]


def read_run(folder: Path) -> ScoredRun:
    """Reads the logs in `folder`; what cannot be read is among the problems of the result."""
    run = ScoredRun(folder.name)
    log = folder / "train.log"
    if not log.exists():
        run.problems.append(f"{log} is missing: {folder.name} was not trained")
        return run
    run.read_training(log)
    try:
        run.measured = json.loads((folder / "speed.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except ValueError:
        run.problems.append(f"{folder / 'speed.json'} is damaged: measure again with speed.py")
    for name, column in EVALUATIONS.items():
        for log in sorted([*folder.glob(f"{name}.log"), *folder.glob(f"{name}.*.log")]):
            checkpoint = log.name[len(name) + 1 : -len(".log")]
            found = re.search(r"Perplexity: ([\d.]+|inf|nan)", log.read_text(encoding="utf-8", errors="replace"))
            if found:
                run.scores[f"{column} ({checkpoint})" if checkpoint else column] = float(found[1])
            else:
                run.problems.append(f"{log} ends before the perplexity: delete it and score again")
    return run


def format_runs(runs: list[ScoredRun]) -> str:
    """A table in markdown, with columns only for what was scored somewhere."""
    scored = sorted({name for run in runs for name in run.scores})
    columns = [
        name
        for column in dict.fromkeys(EVALUATIONS.values())
        for name in scored
        if name == column or name.startswith(f"{column} (")
    ]
    measured = any(run.measured for run in runs)
    speeds = list(MEASURED.values()) if measured else ["train words/s"]
    header = ["model", "parameters", "updates", "valid, in training", *columns, *speeds]
    rows = []
    for run in runs:
        if run.missing:
            rows.append([run.name, "missing", *[summaries.ABSENT] * (len(header) - 2)])
            continue
        best = min(run.training.valid.values(), default=None)
        numbers = [run.measured.get(name) for name in MEASURED] if measured else [run.training.speed]
        rows.append(
            [
                run.name,
                f"{run.training.parameters:,}",
                f"{run.training.updates:,}" + ("" if run.training.finished else " (unfinished)"),
                *(summaries.shown(x, ".2f") for x in (best, *map(run.scores.get, columns))),
                *(summaries.shown(x, ",.0f") for x in numbers),
            ]
        )
    return format_table(header, rows)


def read_points(table: str) -> dict[str, tuple[float, float]]:
    """By model, the size of its state and the lower of its perplexities in `POINTS`, from a table of `format_runs`."""
    points = {}
    for row in read_table(table, "model", MEASURED["state"]):
        state = number(row[MEASURED["state"]])
        scores = [score for column in POINTS if (score := number(row.get(column, ""))) is not None]
        if state and scores:
            points[row["model"]] = (state, min(scores))
    return points


def draw_states(points: dict[str, tuple[float, float]], path: Path) -> None:
    """Draws perplexities over state sizes, and saves a PNG."""
    smallest, perplexity = min(points.values())
    softmax = points.get("softmax", (0, 0))
    message = "Test perplexity against the size of the state"
    if smallest < softmax[0] and perplexity < softmax[1]:
        message = (
            f"A fast weight memory of {smallest:,.0f} numbers reaches a lower perplexity than softmax attention with a "
            f"cache of {softmax[0]:,.0f}"
        )
    figure, axes = new_figure(figsize=(8.6, 4.8))
    say(
        figure,
        message,
        "One seed: differences of a few points mean nothing. Each model evaluated as it does best: in a sliding "
        "window, or with its state carried over from the start of the text. Names in -carried: trained so, too.",
    )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="size of the state after 256 words, in numbers", ylabel="test perplexity (lower is better)")
    states = [state for state, _ in points.values()]
    axes.set_xlim(0.75 * min(states), 1.5 * max(states))
    draw_points(axes, points)
    plain_numbers(axes.xaxis, base=2)
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
