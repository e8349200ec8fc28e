"""The commands of a demo: where they run, and how they are written down."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from common import matrix_products
from common.steps import UserError

ROOT = Path(__file__).resolve().parents[2]
"""Where the commands run: --user-dir fairseq_fastweights is found there."""


def one_thread() -> dict[str, str]:
    """Variables of processes that train, one on each core."""
    return {
        # Many processes of one thread each make better use of a processor than one of many threads.
        "OMP_NUM_THREADS": "1",
        # The C library would hand every large tensor back to the system, which has to clear memory for the next one.
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**33),
        **matrix_products.environment(),
    }


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_packages(*names: str) -> None:
    """Checks that packages are installed, before any work that would miss them at its end. Raises UserError if one is
    not.
    """
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"there is no package {name} for {sys.executable}; `make setup` installs it")


def command(program: str, *parts: str | Path) -> list[str]:
    """A command in words. Strings may hold several; paths are relative to `ROOT` if they are in it. Raises UserError if
    the program is not installed beside this Python.
    """
    path = Path(sys.executable).parent / program
    if not path.exists():
        raise UserError(f"there is no {program} beside {sys.executable}; `make setup` installs it")
    words = [shown(path)]
    for part in parts:
        words += [shown(part)] if isinstance(part, Path) else shlex.split(part)
    return words


def shown(path: Path) -> str:
    """A path as people type it in `ROOT`."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
