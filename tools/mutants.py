"""Trials of mutants, for `mutation.py` and `kernel_mutation.py`: copies of the checkout, tests in forks, a record."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    *("torch", "torch._dynamo", "numpy", "pytest", "fairseq", "fairseq.tasks", "fairseq.models"),
    *("transformers", "transformers.trainer", "lm_eval.models.huggingface"),
)


@dataclass(frozen=True)
class Mutant:
    """A change of a file: `instead` replaces the `text` of a line."""

    path: str
    line: int
    text: str
    instead: str


M = TypeVar("M", bound=Mutant)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, sample: int, out: Path) -> Any:
    """The options, with those that both programs have."""
    parser.add_argument("--sample", type=int, default=sample, help=f"number of mutants (default: {sample})")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials side by side")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other mutant after them")
    parser.add_argument("--out", type=Path, default=out, help="a line for each mutant")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:  # rejects NaN, too
        parser.error(f"--minutes is {options.minutes}; it must be positive")
    options.end = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Bench:
    """A copy of the checkout, in which one mutant at a time is tried."""

    def __init__(self, copy: Path) -> None:
        self.copy, self.output = copy, copy / "output.txt"
        shutil.rmtree(copy, ignore_errors=True)
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "results")
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)

    def passes(self, arguments: Sequence[str], limit: float, **environment: str) -> bool:
        """True if pytest passes within `limit` seconds of CPU time, in a fork that imports the package of the copy."""
        child = os.fork()
        if child == 0:
            os.setsid()
            # CPU time, as a busy machine slows the clock's; SIGXCPU ends the process.
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
            os.chdir(self.copy)
            sys.path[:0] = paths = [str(self.copy), str(self.copy / "tools")]
            os.environ.update(environment, PYTHONPATH=os.pathsep.join(paths))
            output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = 1
            try:
                flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
                status = int(importlib.import_module("pytest").main([*flags, *arguments]))
            finally:
                os._exit(status)
        deadline = time.monotonic() + limit + 1000  # for tests that wait and compute nothing
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status) in (0, 5)  # 5: none of these tests
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False


def try_all(
    options: Any,
    left: Sequence[M],
    trials: Callable[[int], Callable[[M], str]],
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Records the outcome of each mutant, until there are enough; `trials` makes the function that tries, by worker."""
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    for name in HEAVY:  # once for all forks, which import only the package itself
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)

    def work(number: int) -> None:
        outcome_of = trials(number)
        for mutant in left[number :: options.jobs]:
            started = time.monotonic()
            if started > options.end or enough():
                break
            outcome = outcome_of(mutant)
            result = asdict(mutant) | {"outcome": outcome, "seconds": round(time.monotonic() - started, 1)}
            with options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            if outcome in ("survived", "not run"):
                place = f"{outcome}: {mutant.path}:{mutant.line}"
                print(place, mutant.text.strip(), mutant.instead.strip(), sep="\n    ", flush=True)

    # Each worker forks, which threads may not.
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(number,)) for number in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(f"a worker failed, as printed above; {options.out} has the trials so far, for another run")
