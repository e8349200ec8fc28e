"""The demos that train with fairseq: their options, their text, and the table and figure of their models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from papers.drawing import draw_validation
from papers.grid import Way, plan, run_grid
from papers.ledger import Entry, read_ledger
from papers.rows import Places, Row, Table

from common.command_line import add_out, positive
from common.commands import cores, program, programs_on_path
from common.steps import Runner, Step

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Two commands of one thread each make better use of two cores than one of two threads."""
# Without a buffer for data: the thread that fills one may be at work when a training ends within an epoch, and Python
# then sometimes aborts instead of ending. Batches are cut to multiples of 8, as fairseq does by default.
TRAINING = """
    --optimizer adam --adam-betas '(0.9, 0.98)' --lr-scheduler cosine --cpu --num-workers 0 --data-buffer-size 0
    --keep-interval-updates 1 --required-batch-size-multiple 8
"""
NEVER = 1_000_000
"""Epochs between validations: they are counted in updates, for an epoch may be short or endless."""


def add_options(
    parser: argparse.ArgumentParser, *, out: Path, updates: int, batch: str, seed: str, models: Iterable[str]
) -> None:
    """Adds the options that these demos have.

    `out`: where the results go by default. `updates`: how long a training is by default. `batch`: of an update, and
    `seed`: the use of the seed, both for people. `models`: the names of the models.
    """
    add_out(parser, out)
    help = f"how long each training is, in batches of {batch} (default: {updates})"
    parser.add_argument("--updates", type=positive, default=updates, metavar="N", help=help)
    parser.add_argument("--seed", type=positive, default=1, metavar="N", help=f"of {seed} (default: 1)")
    names = list(models)
    help = f"which models, of {', '.join(names)} (default: all)"
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME", help=help)


def schedule(updates: int, warmup: int, interval: int) -> str:
    """Options of a training: `warmup`, the updates until the learning rate is highest, at most a fifth; `interval`, the
    updates between validations, each of which leaves a checkpoint.
    """
    return (
        f"--max-update {updates} --warmup-updates {min(warmup, updates // 5)} "
        f"--validate-interval {NEVER} --validate-interval-updates {interval} "
        f"--save-interval {NEVER} --save-interval-updates {interval}"
    )


def preprocessing(out: Path, texts: Mapping[str, Path], *options: str, **others: Any) -> Step:
    """A step of `fairseq-preprocess`; `texts` are the prefixes of the splits, `others` as of `Step`."""
    words = [word for split, path in texts.items() for word in (f"--{split}pref", str(path))]
    words = [program("fairseq-preprocess"), *options, *words, "--destdir", str(out / "bin")]
    return Step("turning the text into numbers", out / "bin", words, **others)


def run_steps(*steps: Step) -> None:
    """Raises UserError if one fails."""
    Runner(cores(), sys.stdout, ENVIRONMENT).run(steps)


@dataclass(frozen=True)
class Trained:
    """A model of a demo: its entry in the ledger, and the folder of its checkpoints."""

    entry: Entry
    folder: Path


def train_and_score(name: str, rows: Mapping[str, Row], options: argparse.Namespace, mark: str) -> dict[str, Trained]:
    """Trains and scores the rows on the data in `options.out`/bin, draws curves.png there, and returns the models by
    row. Raises UserError if a command fails. `mark`: the file that marks the folder as this demo's.
    """
    programs_on_path()
    out, table = options.out, Table(name, "", (), dict(rows))
    extra = ["--log-interval", str(max(1, min(10, options.updates // 10)))]
    runs = plan(name, table, list(rows), [options.seed], Places(out / "bin", out), extra)
    way = Way(estimate="no", environment=ENVIRONMENT, mark=mark, replaces=True)
    run_grid(runs, out, out / "ledger.jsonl", way)
    found = {run.name: [e for e in read_ledger(out / "ledger.jsonl") if e.key == run.key][-1] for run in runs}
    draw_validation(table, list(found.values()), out / "curves.png")
    return {run.name: Trained(found[run.name], run.places.out) for run in runs}
