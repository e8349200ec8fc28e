"""The commands of a demo: where they run, and how they are written down."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from common.fairseq_logs import describe_training, read_training
from common.steps import Runner, Step, StepError

ROOT = Path(__file__).resolve().parents[2]
"""Where the commands run: --user-dir fairseq_fastweights is found there."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Two commands of one thread each make better use of two cores than one of two threads."""

# Without a buffer for data: the thread that fills one may be at work when a training ends within an epoch, and Python
# then sometimes aborts instead of ending.
TRAINING = """
    --optimizer adam --adam-betas '(0.9, 0.98)' --lr-scheduler cosine
    --num-workers 0 --data-buffer-size 0 --log-format json --no-epoch-checkpoints --keep-interval-updates 1
"""
NEVER = 1_000_000
"""Epochs between validations: they are counted in updates, for an epoch may be short or endless."""


def start_runner(claimed: int) -> Runner:
    """A runner for commands in `ROOT`, on all cores that this process may use.

    Args:
        claimed: a descriptor that every command inherits (`steps.claim`).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Runner(ROOT, cores or 1, sys.stdout, ENVIRONMENT, keep_open=[claimed])


def require_packages(*names: str) -> None:
    """Checks that packages are installed, before any work that would miss them at its end.

    Raises:
        StepError: if one is not.
    """
    for name in names:
        if find_spec(name) is None:
            raise StepError(f"there is no package {name} for {sys.executable}; `make setup` installs it")


def command(program: str, *parts: str | Path) -> list[str]:
    """A command in words. Strings may hold several; paths are relative to `ROOT` if they are in it.

    Raises:
        StepError: if the program is not installed beside this Python.
    """
    path = Path(sys.executable).parent / program
    if not path.exists():
        raise StepError(f"there is no {program} beside {sys.executable}; `make setup` installs it")
    words = [shown(path)]
    for part in parts:
        words += [shown(part)] if isinstance(part, Path) else shlex.split(part)
    return words


def training(
    title: str,
    folder: Path,
    *options: str | Path,
    updates: int,
    warmup: int,
    interval: int,
    seed: int,
    after: Sequence[Step],
) -> Step:
    """A step of `fairseq-train`.

    Args:
        title: what is trained, for people.
        folder: for the checkpoints.
        options: the data's folder, and all that `TRAINING` and the schedule leave open.
        updates, warmup: how long it is, and how many of the updates the learning rate takes to its highest.
        interval: updates between validations, each of which leaves a checkpoint.
        seed: of the initial weights and the order of batches.
        after: the steps whose results it uses.
    """
    schedule = (
        f"--max-update {updates} --warmup-updates {min(warmup, updates // 5)} "
        f"--log-interval {max(1, min(10, updates // 10))} --seed {seed} "
        f"--validate-interval {NEVER} --validate-interval-updates {interval} "
        f"--save-interval {NEVER} --save-interval-updates {interval}"
    )
    return Step(
        f"training the {title}",
        folder,
        command("fairseq-train", *options, TRAINING, schedule, "--save-dir", folder),
        read_training,
        describe_progress=lambda log: describe_training(log, updates),
        after=after,
        resumes=True,
    )


def shown(path: Path) -> str:
    """A path as people type it in `ROOT`."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
