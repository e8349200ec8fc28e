"""One comparison: all contestants at one shape, dtype and pass, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.cases import DTYPES, Pass, Shape, draw_inputs
from harness.contestants import Contestant, Unavailable, Unsuitable, Work
from harness.limits import limit_of
from harness.timing import Call, Clock, describe, first_calls, synchronizer, time_in_turns

# Contestants that say they compute the same must agree to this, by norms: far above rounding, far below a mistake.
AGREEMENT = {"float32": 1e-3, "bfloat16": 5e-2}

# What a row says of who was not compiled.
NOT_COMPILED = "no time was left in the budget"

Row = dict[str, Any]


def compare(
    shape: Shape,
    dtype: str,
    kind: Pass,
    contestants: Sequence[Contestant],
    *,
    device: str,
    clock: Clock,
    rates: dict[str, Any],
    rounds: int,
    allowed: float = math.inf,
    compiling: float = math.inf,
    longest_call: float = math.inf,
) -> tuple[list[Row], int]:
    """Measures all contestants that can take part.

    Args:
        kind: "forward" without gradients, "forward+backward" with the gradients of all inputs, or "step".
        compiling: seconds after which a contestant that compiles is not begun any more.
        longest_call: who takes more seconds than this does not take part.
        others: as `timing.time_in_turns` has them.

    Returns:
        a row for each contestant, with "status" "measured", "unavailable", "failed" or "left out" (it takes
        too long, or no time was left for it), and the number of rounds.
    """
    began = time.perf_counter()
    inputs = draw_inputs(shape, DTYPES[dtype], device)
    rows: dict[str, Row] = {}
    works: dict[str, Work] = {}
    calls: dict[str, Call] = {}
    warm: dict[str, float] = {}
    hosts: dict[str, float] = {}
    references: dict[str, Tensor] = {}
    # Chunkwise, which is there on every machine, says what is right; it is asked first, and measured in its turn.
    for contestant in sorted(contestants, key=lambda c: c.name != "chunkwise"):
        row: Row = {
            "shape": shape.name,
            "sizes": shape.sizes(),
            "dtype": dtype,
            "pass": kind,
            "implementation": contestant.name,
            "rule": contestant.rule,
        }
        rows[contestant.label] = row
        try:
            work = contestant.prepare(shape, inputs)
            if contestant.compiles and time.perf_counter() - began >= compiling:
                row |= {"status": "left out", "message": NOT_COMPILED}
                continue
            call = work.run_both if kind == "forward+backward" else work.run_forward
            first, second, host = first_calls(call, synchronizer(device), longest_call)
            row |= {"first call": first, "second call": second}
            if min(first, second) > longest_call:
                row |= {"status": "left out", "message": f"a call takes {first:.1f} s, over {longest_call:g} s"}
                continue
            if contestant.same:
                out = work.as_reference(work.run_forward()).float()
                reference = references.setdefault(contestant.rule, out)
                difference = ((out - reference).norm() / reference.norm()).item()
                if not difference <= AGREEMENT[dtype]:
                    row |= {"status": "failed", "message": f"wrong: its output differs by {difference:.2g}"}
                    continue
                row["difference"] = difference
        except Unsuitable:
            del rows[contestant.label]
            continue
        except Unavailable as reason:
            row |= {"status": "unavailable", "message": str(reason)}
            continue
        except Exception as error:  # a peer's errors are results, whatever they are
            row |= {"status": "failed", "message": describe(error)}
            continue
        works[contestant.label], calls[contestant.label] = work, call
        warm[contestant.label], hosts[contestant.label] = second, host
    references.clear()

    labels = [contestant.label for contestant in contestants]
    left = allowed - (time.perf_counter() - began)
    turns = {label: calls[label] for label in labels if label in calls}
    measured, made = time_in_turns(turns, warm, clock, hosts=hosts, rounds=rounds, allowed=max(left, 0.0))
    for label, seconds in measured.items():
        row = rows[label]
        limit = limit_of(shape, row["rule"], dtype, kind, inputs, rates)
        row |= {
            "status": "measured",
            "seconds": seconds,
            "limit": {
                "bytes": limit.bytes,
                "operations": limit.operations,
                "seconds": limit.seconds,
                "binding": limit.binding,
            },
        }
        if device == "cuda" and kind == "forward+backward":
            row["memory"] = training_memory(works[label])
    return [rows[label] for label in labels if label in rows], made


def training_memory(work: Work) -> dict[str, int]:
    """What forward and backward take of a GPU's memory, in bytes.

    Returns:
        "extra", the peak beyond inputs, output and the gradients of both, and "tensors", the size of all these.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = work.run_both()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del gradients
    # The output's gradient is there before, the output and the inputs' gradients come with the call.
    given = sum(x.numel() * x.element_size() for x in work.inputs)
    out = work.d_out.numel() * work.d_out.element_size()
    return {"extra": max(0, peak - given - out), "tensors": 2 * given + 2 * out}
