"""What the programs share: the options of their command lines, and what becomes of a record."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from harness import pages, records, targets
from harness.cases import RULES
from harness.contestants import DEFAULT_FOLDER
from harness.timing import ROUNDS


def make_parser(doc: str | None, options: bool = True) -> argparse.ArgumentParser:
    """A parser; `options` are those of the programs that measure on a device of one's choice."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if options:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
        parser.add_argument("--threads", type=positive, help="threads on the CPU (default: torch's)")
        add_budget(parser, ROUNDS)
        parser.add_argument("--quick", action="store_true", help="tiny cases, to see that the program runs")
    return parser


def add_budget(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--budget", type=duration, metavar="SECONDS", help="cut rounds, then cases, to take no longer")
    parser.add_argument(
        "--rounds", type=positive, default=rounds, help="times that each call is measured (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this JSON file")


def add_peers(parser: argparse.ArgumentParser) -> None:
    add_list(parser, "--rules", RULES)
    text = "where build_causal_product.py put its kernel (default: build/peers)"
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, metavar="FOLDER", help=text)


def add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", help="of the fast weight models (default: %(default)s)")


def add_figure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the figure to this PNG")


def add_list(parser: argparse.ArgumentParser, option: str, names: Sequence[str], default: str | None = None) -> None:
    """An option for some of these names; without it there are all, or None where the default is told."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(word.strip() for word in text.split(","))
        unknown = ", ".join(word for word in chosen if word not in names)
        if unknown:
            raise argparse.ArgumentTypeError(f"no such {option[2:]}: {unknown}; there are {', '.join(names)}")
        return chosen

    text = f"of {','.join(names)}" + (f" (default: {default})" if default else "")
    parser.add_argument(option, type=parse, default=None if default else tuple(names), metavar="LIST", help=text)


def positive(text: str) -> int:
    """A positive whole number of the command line."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def duration(text: str) -> float:
    """A positive number of seconds of the command line."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses, sets threads, and ends the program where the device that was asked for is not there."""
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 2)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device is cuda, and torch sees no GPU")
    return options


def finish(record: dict[str, Any], options: argparse.Namespace, draw: Callable[..., None] | None = None) -> None:
    """Shows a record, its targets and its figure, and writes it."""
    print(pages.render(record))
    print(targets.render(targets.evaluate_one(record)))
    if options.out is not None:
        records.write(record, options.out)
    if draw is not None and options.figure is not None:
        draw(record, options.figure)
