"""What the programs that summarise trainings share: their options, a training's log, read for a person who asks how far
it came, the table and what is wrong, and curves of several trainings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from common.fairseq_logs import Training, parse_training
from common.figures import draw_trainings

ABSENT = "–"


@dataclass
class Run:
    """What one model left behind: the `name` of its folder, what the training's log says, and `problems`, what is wrong
    with the files, for a person to read."""

    name: str
    training: Training = field(default_factory=Training)
    problems: list[str] = field(default_factory=list)

    @property
    def missing(self) -> bool:
        """Whether there is nothing of it."""
        return self.training.parameters is None

    def read_training(self, log: Path) -> str:
        """Reads the log of its training, which must exist; returns its text."""
        text = log.read_text(encoding="utf-8", errors="replace")
        self.training = training = parse_training(text)
        self.problems += [f"{log} has a damaged line: {line[:100]}" for line in training.damaged]
        if training.parameters is None:
            self.problems.append(f"{log} ends before the model was built")
        elif not training.finished:
            valid = training.valid
            reached = f"last validation at update {max(valid)}" if valid else "no validation yet"
            self.problems.append(f"{log} is of an unfinished training: it ends at update {training.updates}, {reached}")
        return text


R = TypeVar("R", bound=Run)


def summary_parser(description: str) -> argparse.ArgumentParser:
    """The options of all summaries."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path, metavar="OUT", help="holds one folder for each model")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of folders in OUT (default: all)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the curves (PNG)")
    return parser


def summarize(
    options: argparse.Namespace, find: Callable[[Path], list[R]], what: str, tell: Callable[[list[R]], str]
) -> list[R]:
    """Prints the table that `tell` makes of the runs that `find` finds, and their problems; returns them. Ends the
    program if there is nothing, that is, no `what`."""
    if not options.out.is_dir():
        fail(f"there is no folder {options.out}")
    runs = find(options.out)
    for problem in (problem for run in runs for problem in run.problems):
        print(f"summarize.py: {problem}", file=sys.stderr)
    if all(run.missing for run in runs):
        fail(f"{options.out} holds no folder with {what}")
    table = tell(runs)
    print(table)
    if options.markdown:
        options.markdown.write_text(table + "\n", encoding="utf-8")
    return runs


def fail(message: str) -> None:
    print(f"summarize.py: {message}", file=sys.stderr)
    sys.exit(1)


def shown(value: float | None, form: str) -> str:
    return ABSENT if value is None else format(value, form)


def draw_curves(runs: Sequence[Run], path: Path, perplexity: str) -> None:
    """Draws perplexity, which the axes call as `perplexity` says, over updates, and saves a PNG."""
    curves = {run.name: (sorted(run.training.train.items()), sorted(run.training.valid.items())) for run in runs}
    draw_trainings(curves, path, perplexity)
