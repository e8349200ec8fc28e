"""Tables of papers, and how a row of one is trained and scored."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from common.commands import ROOT, program, shown
from common.files import UserError

PACKAGE = ROOT / "fairseq_fastweights"
_KERNELS = "_native_*.so"
BEST = "checkpoint_best.pt"
CONVERTED = "model.pt"


@dataclass(frozen=True)
class Places:
    """The folders of a call."""

    data: Path  # as the experiment's prepare.sh leaves it
    out: Path  # for the checkpoints and logs of this model
    source: Path | None = None  # the folder or checkpoint that a model starts from, if it starts from one

    @property
    def checkpoint(self) -> Path | None:
        """The one that `source` is or holds."""
        if self.source is None or not self.source.is_dir():
            return self.source
        found = [path for name in (CONVERTED, BEST) if (path := self.source / name).exists()]
        return found[0] if found else self.source / CONVERTED


@dataclass(frozen=True)
class Scoring:
    """A program that scores a checkpoint."""

    words: list[str]  # its name and arguments
    title: str  # the text and the way of scoring, for people
    folder: str  # of its log and results, in OUT
    checkpoint: Path  # the one that it scores
    reads: Sequence[Path]  # the files of the data that it reads


class Recipe(Protocol):
    """How the rows of a table are trained and scored."""

    sources: bool
    """Whether a training starts from a model."""

    def training(self, row: str, places: Places, options: list[str], env: Mapping[str, str]) -> list[str]:
        """The command that trains a row with these options; `options` are those of the command line. Raises UserError
        if a setting in the environment cannot be.
        """

    def evaluations(self, places: Places, options: list[str], env: Mapping[str, str]) -> list[Scoring]:
        """All that scores a trained model; raises as `training` does."""

    def scores(self, title: str, places: Places, log: str) -> dict[str, float]:
        """The results of an evaluation by name, read from its output `log`. Raises ValueError if it has none."""

    def check(self, verb: str, places: Places, env: Mapping[str, str]) -> None:
        """Checks the files in the folders. Raises UserError if something is missing."""

    def finish(self, places: Places) -> None:
        """Leaves in OUT whatever else a model needs there, once its training has come to its end."""


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    model: str  # for people, in the paper's words
    recipe: Recipe
    options: str  # further ones of fairseq-train; the word SOURCE stands for the checkpoint that it starts from
    numbers: tuple[str, ...]  # the paper's, in the order of the table's measures
    seeds: tuple[int, ...] = (1,)  # those that `reproduce.py run` trains it with
    source: str | None = None  # the row of whose first seed's model it starts


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, or an expectation, about rows that are scaled down."""

    text: str  # for people
    of: tuple[str, str]  # a row and the name of one of its scores
    minus: tuple[str, str] | None = None  # the score that is subtracted from it, if any
    at_least: float | None = None
    at_most: float | None = None


def read_claims(measure: str, text: str, **measures: str) -> tuple[Claim, ...]:
    """Claims of lines `TEXT: ROW [- ROW] >= NUMBER`, or `<= NUMBER`, or `in NUMBER..NUMBER`. A row's score is
    `measure`, or the one of `measures` that a name after @ stands for.
    """

    def claim(line: str) -> Claim:
        told, _, formula = line.strip().rpartition(": ")
        sides, relation, bound = re.split(" (>=|<=|in) ", formula)
        rows = [row.partition("@") for row in sides.split(" - ")]
        scores = [(row, measures[name] if name else measure) for row, _, name in rows]
        low, _, high = bound.partition("..") if relation == "in" else (bound, "", bound)
        least, most = None if relation == "<=" else float(low), None if relation == ">=" else float(high)
        return Claim(told, scores[0], scores[1] if len(scores) > 1 else None, least, most)

    return tuple(map(claim, text.strip().splitlines()))


@dataclass(frozen=True)
class Table:
    """A table of a paper."""

    title: str  # paper, number and subject
    folder: str  # of examples/, where the README says more
    measures: tuple[str, ...]  # the names of the paper's numbers
    rows: dict[str, Row]  # by their names on the command line
    claims: tuple[Claim, ...] = ()  # of tables that are scaled down
    page: str = "results.md"  # of docs/, where the results are
    baseline: tuple[str, str] | None = None  # the row, and its perplexity, that the losses of all are compared with


def training(places: Places, task: str, row: str, options: list[str], gpus: int, update_freq: int) -> list[str]:
    """A command of fairseq-train.

    `row`: options; the word SOURCE stands for the checkpoint that the model starts from. `options`: those of the
    command line, which override the others.
    """
    words = [program("fairseq-train"), str(places.data), "--save-dir", str(places.out)]
    words += ["--user-dir", shown(plugin()), "--task", task]
    words += [str(places.checkpoint) if word == "SOURCE" else word for word in shlex.split(row)]
    words += ["--distributed-world-size", str(gpus), "--update-freq", str(update_freq)]
    return [*words, "--no-epoch-checkpoints", "--log-format", "json", "--log-interval", "100", *options]


@cache
def plugin() -> Path:
    """The folder for --user-dir: the sources, or the installed package if only that has compiled kernels."""
    spec = find_spec(PACKAGE.name)
    installed = Path(spec.origin).parent if spec is not None and spec.origin is not None else PACKAGE
    needed = not any(PACKAGE.glob(_KERNELS)) and any(installed.glob(_KERNELS))
    return installed if needed and _code(installed) == _code(PACKAGE) else PACKAGE


def _code(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.py")}


def positive(env: Mapping[str, str], name: str, default: int = 1) -> int:
    """A setting in the environment. Raises UserError if it is none."""
    text = env.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise UserError(f"{name} is {text}; it must be a positive number")
    return int(text)


def require(place: str, folder: Path, name: str) -> None:
    """Checks that a folder of data is prepared. Raises UserError if it is not."""
    if not (folder / name).exists():
        raise UserError(f"{place} is {folder}, which holds no {name}; prepare.sh makes it")
