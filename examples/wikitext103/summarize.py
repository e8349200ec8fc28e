#!/usr/bin/env python
"""Makes a table, and curves, of what wikitext2.sh, or ../reproduce.py for rows of the papers' tables, left in OUT.

    summarize.py OUT [MODEL ...] [--markdown FILE] [--figure FILE] [--state-figure FILE]

OUT has one folder for each model, with train.log and the logs of evaluations in it, and what speed.py measured. What is
not of the best checkpoint stands in a column of its own. Without MODEL all models are listed, and those that
wikitext2.sh would have made besides.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import summaries
from common.figures import new_figure, plain, save_figure
from common.tables import format_table

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
"""The columns that the figure of states draws the lower one of."""


@dataclass
class ScoredRun(summaries.Run):
    """What the logs of one model say.

    `scores`: perplexity by column of the table. `measured`: what speed.py wrote, by its names.
    """

    scores: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = summaries.summary_parser("Table and curves of trained language models.", "OUT")
    parser.add_argument("--state-figure", type=Path, metavar="FILE", help="draw perplexity over state size (PNG)")
    options = parser.parse_args(arguments)

    def find(out: Path) -> list[ScoredRun]:
        return [read_run(out / name) for name in options.models or find_models(out)]

    runs = summaries.summarize(options, find, "the log of a training", format_runs)
    if options.figure:
        summaries.draw_curves(runs, options.figure, "perplexity")
    if options.state_figure:
        drawn = [run for run in runs if "state" in run.measured and POINTS & set(run.scores)]
        if not drawn:
            summaries.fail(f"{options.out} holds no model that is both scored and measured")
        draw_states(drawn, options.state_figure)
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


def draw_states(runs: list[ScoredRun], path: Path) -> None:
    """Draws the lower perplexity of each model, in windows (dots) or carried over (triangles), over its state size."""
    figure, axis = new_figure(figsize=(8, 4.6))
    points: list[tuple[float, float]] = []
    for run in runs:
        column = min(POINTS & set(run.scores), key=run.scores.__getitem__)
        point = (run.measured["state"], run.scores[column])
        axis.plot(*point, "^" if "carried" in column else "o", color="C0", markersize=6)
        # On the left where there is a name on the right already.
        taken = any(x == point[0] and abs(y / point[1] - 1) < 0.03 for x, y in points)
        points.append(point)
        place, side = ((-6, 3), "right") if taken else ((6, 3), "left")
        axis.annotate(run.name, point, xytext=place, ha=side, textcoords="offset points", fontsize=8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.margins(x=0.15, y=0.08)
    axis.set_xlabel("numbers of state after 256 words (log scale)")
    axis.set_ylabel("test perplexity")
    plain(axis)
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
