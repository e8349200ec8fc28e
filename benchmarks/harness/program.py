"""The options of the programs' command lines, and how a program ends with a record."""

import math
import sys
from argparse import ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fairseq_fastweights.suggestions import ArgumentParser
from harness import pages
from harness.timing import ROUNDS


def positive(text: str, kind: type = int) -> Any:
    """A positive number of the command line: a whole one, or one of seconds."""
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        wanted = "whole number" if kind is int else "number of seconds"
        raise ArgumentTypeError(f"{text} is not a positive {wanted}")
    return number


# The options that several programs have.
OPTIONS: dict[str, dict[str, Any]] = {
    "--device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "default: %(default)s"},
    "--threads": {"type": positive, "help": "threads on the CPU (default: torch's)"},
    "--budget": {"type": partial(positive, kind=float), "help": "seconds; rounds, then cases, are cut to keep to it"},
    "--rounds": {"type": positive, "help": "times that each call is measured (default: %(default)s)"},
    "--out": {"type": Path, "metavar": "FILE", "help": "write the results to this JSON file"},
    "--quick": {"action": "store_true", "help": "tiny cases, to see that the program runs"},
    "--figure": {"type": Path, "metavar": "FILE", "help": "draw the figure to this PNG"},
    "--backend": {"default": "auto", "help": "of the linear attention (default: %(default)s)"},
}
COMMON = ("--device", "--threads", "--budget", "--rounds", "--out", "--quick")


def make_parser(doc: str | None, *options: str, rounds: int = ROUNDS, **lists: Sequence[str]) -> ArgumentParser:
    """A parser with some of `OPTIONS`, and for each list an option that selects some of its names."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for option in options:
        parser.add_argument(option, **OPTIONS[option])
    parser.set_defaults(rounds=rounds)
    for name, words in lists.items():
        text = f"of {', '.join(words)} (default: all)"
        parser.add_argument(f"--{name}", nargs="+", choices=words, default=words, metavar="NAME", help=text)
    return parser


def parse(parser: ArgumentParser) -> Namespace:
    """Parses and sets threads. Ends the program if there is no GPU for --device cuda."""
    options = parser.parse_args()
    options.rounds = min(options.rounds, 2) if options.quick else options.rounds
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device is cuda, and torch sees no GPU")
    return options


def finish(record: dict[str, Any], options: Namespace, draw: Callable[..., None] | None = None) -> None:
    """Shows a record and its figure."""
    print(pages.render(record))
    if draw is not None and options.figure is not None:
        draw(record, options.figure)
