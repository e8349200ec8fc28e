"""Cases one after the other within a budget, and the command-line options that choose them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness import records
from harness.cases import DTYPES, RULES, Pass, Shape
from harness.comparison import NOT_COMPILED, Row, compare
from harness.contestants import Contestant
from harness.limits import measure_rates
from harness.peers import causal_product, flash_linear_attention, ours, softmax
from harness.timing import ROUNDS, Budget, clock_for


@dataclass(frozen=True)
class Case:
    """A comparison to make: a shape with the batch of this device, a dtype and a pass."""

    shape: Shape
    dtype: str
    kind: Pass

    def __str__(self) -> str:
        return f"{self.shape.name}, {self.dtype}, {self.kind}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that the programs share."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=positive, help="threads on the CPU (default: torch's)")
    parser.add_argument("--budget", type=duration, metavar="SECONDS", help="cut rounds, then cases, to take no longer")
    parser.add_argument(
        "--rounds", type=positive, default=ROUNDS, help="times that each call is measured (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this JSON file")
    parser.add_argument("--quick", action="store_true", help="tiny cases, to see that the program runs")


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules", type=list_of("rules", RULES), default=RULES, metavar="LIST", help=f"of {','.join(RULES)}"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=causal_product.DEFAULT_FOLDER,
        metavar="FOLDER",
        help="where build_causal_product.py put its kernel (default: build/peers)",
    )


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


def list_of(what: str, names: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(word.strip() for word in text.split(","))
        unknown = [word for word in chosen if word not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"no such {what}: {', '.join(unknown)}; there are {', '.join(names)}")
        return chosen

    return parse


def set_up(options: argparse.Namespace) -> None:
    """Sets threads, and ends the program where the device that was asked for is not there."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device is cuda, and torch sees no GPU")


def all_contestants(options: argparse.Namespace) -> list[Contestant]:
    """Everybody who does the chosen rules on the chosen device."""
    contestants = [*ours.contestants(options.rules), *softmax.contestants()]
    if options.device == "cuda":
        contestants += flash_linear_attention.contestants(options.rules)
    elif "sum" in options.rules:
        contestants += causal_product.contestants(options.peers)
    return contestants


def measure_all(
    cases: Sequence[Case],
    contestants: Sequence[Contestant],
    options: argparse.Namespace,
    longest_call: float,
    make_record: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Measures the cases in order, and writes what there is after each of them: who is stopped leaves that much.

    Contestants that compile could use up a budget at the first cases. Under one all cases are measured without them,
    and then, while time is left, again with them: such a run of all contestants takes the place of the one before.

    Args:
        longest_call: of `compare`.
        make_record: makes a record of rates, cut and rows: the machine's rates, what was cut to keep to the budget, and
            the rows of `compare`.

    Returns:
        the record.
    """
    budget = Budget(options.budget)
    clock = clock_for(options.device)
    rates = measure_rates(options.device, {c.dtype: DTYPES[c.dtype] for c in cases}, clock, options.quick)
    rows: dict[int, list[Row]] = {}
    cut: dict[int, str] = {}

    def record_so_far() -> dict[str, Any]:
        return make_record(
            rates=rates,
            cut=[cut[number] for number in sorted(cut)],
            rows=[row for number in sorted(rows) for row in rows[number]],
        )

    def measure(number: int, parts: int, compiling: float) -> None:
        case = cases[number]
        compared, made = compare(
            case.shape,
            case.dtype,
            case.kind,
            contestants,
            device=options.device,
            clock=clock,
            rates=rates,
            rounds=options.rounds,
            allowed=budget.share(parts),
            compiling=compiling,
            longest_call=longest_call,
        )
        # The first call in this process is the one of the run before.
        before = {(row["implementation"], row["rule"]): row for row in rows.get(number, ())}
        for row in compared:
            old = before.get((row["implementation"], row["rule"]), {})
            row |= {name: old[name] for name in ("first call", "second call") if name in old}
        rows[number] = compared
        cut.pop(number, None)
        if made < options.rounds:
            cut[number] = f"{case}: {made} rounds of {options.rounds}"
        medians = {
            f"{row['implementation']} {row['rule']}": row["seconds"]["median"]
            for row in compared
            if row["status"] == "measured"
        }
        shown = ", ".join(f"{name} {median * 1e3:.3g}" for name, median in medians.items())
        print(f"{case}: {shown} ms", file=sys.stderr, flush=True)
        if options.out is not None:
            records.write(record_so_far(), options.out)

    again: list[int] = []
    for number, case in enumerate(cases):
        if budget.left <= 0:
            cut[number] = f"{case}: not measured"
            continue
        # A run that is to come once more is one of the parts that share what is left.
        parts = len(cases) - number + len(again)
        measure(number, parts, compiling=math.inf if options.budget is None else 0.0)
        if any(row.get("message") == NOT_COMPILED for row in rows[number]):
            again.append(number)
    longest = 0.0
    for done, number in enumerate(again):
        left = budget.left
        if left <= longest:  # the next would end too late
            break
        measure(number, len(again) - done, compiling=left)
        longest = max(longest, left - budget.left)
    record = record_so_far()
    if options.out is not None:
        records.write(record, options.out)
    return record
