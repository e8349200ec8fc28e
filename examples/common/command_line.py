"""The command lines of the examples: their options, and how a command ends."""

from __future__ import annotations

import argparse
import importlib.util
import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.commands import ROOT, cores, shown
from common.files import UserError

# By its path, since importing the package would import torch.
_spec = importlib.util.spec_from_file_location("suggestions", ROOT / "fairseq_fastweights/suggestions.py")
assert _spec is not None and _spec.loader is not None
_suggestions: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_suggestions)
ArgumentParser = _suggestions.ArgumentParser


def add_out(parser: argparse.ArgumentParser, out: Path) -> None:
    """Adds --out, the folder of the results, with its default."""
    help = f"where the results go (default: {shown(out)})"
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=help)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Adds --jobs, how many points of a grid are trained at a time."""
    help = "points at a time (default: one for each core)"
    parser.add_argument("--jobs", type=positive, default=cores(), metavar="N", help=help)


def run_to_the_end(work: Callable[[], None]) -> int:
    """Does all of a command's work, and ends it in one line on a UserError or OSError; returns the exit status."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, signal.default_int_handler)  # the commands must not outlive this one
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show every text
    try:
        work()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def positive(text: str) -> int:
    """A number of the command line that must be whole and above 0."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)
