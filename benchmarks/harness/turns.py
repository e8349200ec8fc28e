"""Functions that compute the same on a CPU, pass by pass in turns, each with its time over that of the first."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness import records
from harness.memory import keep_freed_memory
from harness.program import make_parser, parse
from harness.timing import Clock, first_calls, time_in_turns

Calls = dict[str, Callable[[], Any]]
Comparison = tuple[str, str, int, Calls]
"""What is compared; its pass, "forward+backward", which differentiates what a call returns (a tensor, or the first of
several), or the name of a pass in which nothing is differentiated; how many steps a call has; the calls by name, of
which the first is what the others are compared with."""


def run(
    doc: str | None, program: str, comparisons: Callable[..., Iterable[Comparison]], sizes: Any, quick_sizes: Any
) -> None:
    """The program of this name: makes all comparisons of the sizes, which go into its record."""
    parser = make_parser(doc, "--threads", "--rounds", "--out", "--quick", rounds=5)
    parser.set_defaults(device="cpu")
    options = parse(parser)
    keep_freed_memory()
    chosen = quick_sizes if options.quick else sizes
    rows = [row for comparison in comparisons(chosen) for row in compare(*comparison, options.rounds)]
    if options.out is not None:
        records.write(records.describe_run(program, "cpu", sizes=chosen, rows=rows), options.out)


def compare(part: str, kind: str, time: int, calls: Calls, rounds: int) -> list[dict[str, Any]]:
    """Makes a comparison; prints and returns a row for each of its calls."""
    way = partial(partial, _backward_too) if kind == "forward+backward" else torch.no_grad()
    calls = {name: way(call) for name, call in calls.items()}
    warm = {name: first_calls(call, lambda: None)[1] for name, call in calls.items()}
    seconds, _ = time_in_turns(calls, warm, Clock(), rounds=rounds)
    first, rows = next(iter(seconds)), []
    for name, measured in seconds.items():
        ratio = measured["median"] / seconds[first]["median"]
        rows.append({"part": part, "pass": kind, "time": time, "name": name, "ratio": ratio, "seconds": measured})
        print(f"{part:14}{kind:18}{time:5}  {name:14}{1e3 * measured['median']:9.1f} ms {ratio:6.2f} x {first}")
    return rows


def _backward_too(forward: Callable[[], Any]) -> None:
    out = forward()
    (out if isinstance(out, Tensor) else out[0]).sum().backward()
