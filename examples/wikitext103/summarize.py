#!/usr/bin/env python
"""Makes a table, and curves, of what wikitext2.sh or the scripts of the tables' rows left in OUT, here or in ../gpt2.

    summarize.py OUT [MODEL ...] [--markdown FILE] [--figure FILE]

OUT has one folder for each model, with train.log and the logs of evaluations in it. Without MODEL all of them are
listed, and those that wikitext2.sh would have made besides.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

WIKITEXT2 = ("softmax", "sum", "delta", "delta-no-positions", "sum-carried", "delta-carried")
EVALUATIONS = {
    # log: column. wikitext2.sh scores the test set only, and does not name it.
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
}
ABSENT = "–"


@dataclass
class Run:
    """What the logs of one model say.

    Attributes:
        train, valid: perplexity by update.
        speed: tokens per second, in the middle of the training's reports.
        scores: perplexity by column of the table.
        problems: what is wrong with the logs, for a person to read.
    """

    name: str
    parameters: int | None = None
    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    speed: float | None = None
    finished: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def updates(self) -> int:
        return max([*self.train, *self.valid], default=0)

    @property
    def missing(self) -> bool:
        return self.parameters is None


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Table and curves of trained language models.")
    parser.add_argument("out", type=Path, metavar="OUT", help="holds one folder for each model")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of folders in OUT (default: all)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw training and validation curves (PNG)")
    options = parser.parse_args(arguments)

    if not options.out.is_dir():
        print(f"summarize.py: there is no folder {options.out}", file=sys.stderr)
        return 1
    runs = [read_run(options.out / name) for name in options.models or find_models(options.out)]
    for problem in (problem for run in runs for problem in run.problems):
        print(f"summarize.py: {problem}", file=sys.stderr)
    if all(run.missing for run in runs):
        print(f"summarize.py: {options.out} holds no folder with the log of a training", file=sys.stderr)
        return 1
    table = format_table(runs)
    print(table)
    if options.markdown:
        options.markdown.write_text(table + "\n", encoding="utf-8")
    if options.figure:
        draw_curves(runs, options.figure)
    return 0


def find_models(out: Path) -> list[str]:
    """The folders in `out` that hold a training; if wikitext2.sh made one of them, all that it makes."""
    found = sorted(log.parent.name for log in out.glob("*/train.log"))
    if not set(found) & set(WIKITEXT2):
        return found
    return [*WIKITEXT2, *(name for name in found if name not in WIKITEXT2)]


def read_run(folder: Path) -> Run:
    """Reads the logs in `folder`; what cannot be read is among the problems of the result."""
    run = Run(folder.name)
    log = folder / "train.log"
    if not log.exists():
        run.problems.append(f"{log} is missing: {folder.name} was not trained")
        return run
    speeds = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := re.search(r"num\. shared model params: ([\d,]+)", line):
            run.parameters = int(found[1].replace(",", ""))
        if "| done training in " in line:
            run.finished = True
        if found := re.search(r"\| (train_inner|valid) \| (\{.*)", line):
            try:
                values = json.loads(found[2])
                if found[1] == "valid":
                    run.valid[int(values["valid_num_updates"])] = float(values["valid_ppl"])
                else:
                    run.train[int(values["num_updates"])] = float(values["ppl"])
                    speeds.append(float(values["wps"]))
            except (ValueError, KeyError):
                run.problems.append(f"{log} has a damaged line: {line[:100]}")
    run.speed = statistics.median(speeds) if speeds else None
    if run.parameters is None:
        run.problems.append(f"{log} ends before the model was built")
    elif not run.finished:
        reached = "no validation yet" if not run.valid else f"last validation at update {max(run.valid)}"
        run.problems.append(f"{log} is of an unfinished training: it ends at update {run.updates}, {reached}")
    for name, column in EVALUATIONS.items():
        log = folder / f"{name}.log"
        if log.exists():
            found = re.search(r"Perplexity: ([\d.]+|inf|nan)", log.read_text(encoding="utf-8", errors="replace"))
            if found:
                run.scores[column] = float(found[1])
            else:
                run.problems.append(f"{log} ends before the perplexity: delete it and score again")
    return run


def format_table(runs: list[Run]) -> str:
    """A table in markdown, with columns only for what was scored somewhere."""
    columns = [name for name in dict.fromkeys(EVALUATIONS.values()) if any(name in run.scores for run in runs)]
    header = ["model", "parameters", "updates", "valid, in training", *columns, "train words/s"]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for run in runs:
        if run.missing:
            rows.append([run.name, "missing", *[ABSENT] * (len(header) - 2)])
            continue
        best = min(run.valid.values(), default=None)
        rows.append(
            [
                run.name,
                f"{run.parameters:,}",
                f"{run.updates:,}" + ("" if run.finished else " (unfinished)"),
                *(ABSENT if x is None else f"{x:.2f}" for x in (best, *map(run.scores.get, columns))),
                ABSENT if run.speed is None else f"{run.speed:,.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw_curves(runs: list[Run], path: Path) -> None:
    """Draws perplexity over updates, training on the left and validation on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, kind in zip(axes, ("train", "valid"), strict=True):
        for number, run in enumerate(runs):
            curve = sorted(getattr(run, kind).items())
            if curve:
                updates, perplexities = zip(*curve, strict=True)
                marker = "o" if kind == "valid" or len(curve) == 1 else None
                axis.plot(updates, perplexities, f"C{number}", marker=marker, markersize=4, linewidth=1.4)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.set_xlim(left=0)
        axis.set_xlabel("updates")
        axis.set_ylabel("perplexity (log scale)")
        axis.set_title("training" if kind == "train" else "validation", loc="left")
        axis.grid(color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    names = [
        plt.Line2D([], [], color=f"C{number}", linewidth=2, label=run.name)
        for number, run in enumerate(runs)
        if run.train or run.valid
    ]
    figure.legend(handles=names, loc="outside lower center", ncols=min(len(names) or 1, 6), frameon=False)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
