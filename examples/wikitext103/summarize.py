#!/usr/bin/env python
"""Makes a table, and curves, of what wikitext2.sh, or ../reproduce.py for rows of the papers' tables, left in OUT.

    summarize.py OUT [MODEL ...] [--markdown FILE] [--figure FILE]

OUT has one folder for each model, with train.log and the logs of evaluations in it. What is not of the best checkpoint
stands in a column of its own. Without MODEL all models are listed, and those that wikitext2.sh would have made besides.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.summaries import Run, draw_curves

WIKITEXT2 = (
    *("softmax", "sum", "delta", "delta-no-positions", "sum-carried", "delta-carried"),
    *("gated", "decay", "retention", "local", "linformer", "abc", "mamba", "transformer-xl-carried"),
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
ABSENT = "–"


@dataclass
class ScoredRun(Run):
    """What the logs of one model say.

    Attributes:
        scores: perplexity by column of the table.
    """

    scores: dict[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> bool:
        return self.training.parameters is None


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
        draw_curves(runs, options.figure, "perplexity")
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
    for name, column in EVALUATIONS.items():
        for log in sorted([*folder.glob(f"{name}.log"), *folder.glob(f"{name}.*.log")]):
            checkpoint = log.name[len(name) + 1 : -len(".log")]
            found = re.search(r"Perplexity: ([\d.]+|inf|nan)", log.read_text(encoding="utf-8", errors="replace"))
            if found:
                run.scores[f"{column} ({checkpoint})" if checkpoint else column] = float(found[1])
            else:
                run.problems.append(f"{log} ends before the perplexity: delete it and score again")
    return run


def format_table(runs: list[ScoredRun]) -> str:
    """A table in markdown, with columns only for what was scored somewhere."""
    scored = sorted({name for run in runs for name in run.scores})
    columns = [
        name
        for column in dict.fromkeys(EVALUATIONS.values())
        for name in scored
        if name == column or name.startswith(f"{column} (")
    ]
    header = ["model", "parameters", "updates", "valid, in training", *columns, "train words/s"]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for run in runs:
        if run.missing:
            rows.append([run.name, "missing", *[ABSENT] * (len(header) - 2)])
            continue
        best = min(run.training.valid.values(), default=None)
        rows.append(
            [
                run.name,
                f"{run.training.parameters:,}",
                f"{run.training.updates:,}" + ("" if run.training.finished else " (unfinished)"),
                *(ABSENT if x is None else f"{x:.2f}" for x in (best, *map(run.scores.get, columns))),
                ABSENT if run.training.speed is None else f"{run.training.speed:,.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
