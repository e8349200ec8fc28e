"""Passes of functions that compute the same, in turns: rows of a record, each with its time over that of the first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.timing import Clock, first_calls, time_in_turns


def compare(part: str, kind: str, time: int, calls: dict[str, Callable[[], Any]], rounds: int) -> list[dict[str, Any]]:
    """Times them in turns, prints and returns a row for each.

    Args:
        part: what is compared.
        kind: "forward+backward", which differentiates what a call returns (a tensor, or the first of several), or the
            name of a pass that nothing is differentiated in.
        time: how many steps a call has.
        calls: by name; the first is what the others are compared with.
        rounds: how often each has its turn.
    """
    if kind == "forward+backward":
        calls = {name: partial(_backward_too, call) for name, call in calls.items()}
    else:
        calls = {name: torch.no_grad()(call) for name, call in calls.items()}
    warm = {name: first_calls(call, lambda: None)[1] for name, call in calls.items()}
    seconds, _ = time_in_turns(calls, warm, Clock(), rounds=rounds)
    first = next(iter(seconds))
    rows = []
    for name, measured in seconds.items():
        ratio = measured["median"] / seconds[first]["median"]
        rows.append({"part": part, "pass": kind, "time": time, "name": name, "ratio": ratio, "seconds": measured})
        print(f"{part:14}{kind:18}{time:5}  {name:14}{1e3 * measured['median']:9.1f} ms {ratio:6.2f} x {first}")
    return rows


def _backward_too(forward: Callable[[], Any]) -> None:
    out = forward()
    out = out if isinstance(out, Tensor) else out[0]
    out.sum().backward()
