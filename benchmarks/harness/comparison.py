"""Comparisons: all implementations of a case take turns, one case after the other, within a budget."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness import records
from harness.cases import DTYPES, Shape, draw_inputs
from harness.implementations import Implementation, Refusal, Work, all_implementations
from harness.limits import limit_of, measure_rates
from harness.memory import peak
from harness.pages import brief
from harness.timing import Budget, Call, Clock, clock_for, first_calls, time_in_turns

# Relative error, by norms, up to which outputs agree: far above rounding, far below a mistake.
AGREEMENT = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A comparison to make: a shape with the batch of this device, a dtype and a pass.

    The pass is "forward" without gradients, "forward+backward" with the gradients of all inputs, or "step".
    """

    shape: Shape
    dtype: str
    kind: str

    def __str__(self) -> str:
        return f"{self.shape.name}, {self.dtype}, {self.kind}"


def compare(
    case: Case,
    implementations: Sequence[Implementation],
    *,
    device: str,
    clock: Clock,
    rates: dict[str, Any],
    rounds: int,
    allowed: float = math.inf,
    longest_call: float = math.inf,
) -> tuple[list[Row], int]:
    """Measures all implementations; outputs are compared with the first implementation of the rule.

    One whose call takes longer than `longest_call` seconds is left out. Returns a row for each, with "status"
    "measured", "unavailable", "failed" or "left out", and the number of rounds.
    """
    began = time.perf_counter()
    shape, both = case.shape, case.kind == "forward+backward"
    inputs = draw_inputs(shape, DTYPES[case.dtype], device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    sizes = {name: getattr(shape, name) for name in ("batch", "heads", "time", "key_dim", "value_dim")}
    rows: dict[str, Row] = {}
    works: dict[str, Work] = {}
    calls: dict[str, Call] = {}
    warm: dict[str, tuple[float, float]] = {}
    references: dict[str, Tensor] = {}
    for implementation in implementations:
        label = f"{implementation.name} {implementation.rule}"
        row: Row = {"shape": shape.name, "sizes": sizes, "dtype": case.dtype, "pass": case.kind}
        row |= {"implementation": implementation.name, "rule": implementation.rule}
        try:
            work = implementation.prepare(shape, inputs)
            call = work.run_both if both else work.run_forward
            patience = math.inf if implementation.compiles else longest_call
            row["first call"], row["second call"], host = first_calls(call, synchronize, patience)
            usual = row["second call"] if implementation.compiles else row["first call"]
            if usual > longest_call:
                raise Refusal("left out", f"a call takes {usual:.1f} s, over {longest_call:g} s")
            if implementation.same:
                out = work.as_reference(work.run_forward()).float()
                reference = references.setdefault(implementation.rule, out)
                row["difference"] = ((out - reference).norm() / reference.norm()).item()
                if not row["difference"] <= AGREEMENT[case.dtype]:
                    raise Refusal("failed", f"wrong: its output differs by {row.pop('difference'):.2g}")
            works[label], calls[label], warm[label] = work, call, (row["second call"], host)
        except Refusal as reason:
            if not reason.args:
                continue
            row["status"], row["message"] = reason.args
        except Exception as error:  # any error of a peer is a result
            row |= {"status": "failed", "message": brief(error)}
        rows[label] = row
    references.clear()

    left = max(allowed - (time.perf_counter() - began), 0.0)
    measured, made = time_in_turns(calls, warm, clock, rounds, left)
    for label, seconds in measured.items():
        limit = limit_of(shape, rows[label]["rule"], case.dtype, case.kind, inputs, rates)
        rows[label] |= {"status": "measured", "seconds": seconds, "limit": limit}
        if device == "cuda" and both:
            # In bytes: "tensors" are inputs, output and the gradients of both, "extra" is the peak beyond these. The
            # call allocates the output and the inputs' gradients.
            work = works[label]
            new = sum(x.nbytes for x in (*work.inputs, work.d_out))
            extra = peak(lambda work=work: work, Work.run_both, device) - new
            rows[label]["memory"] = {"extra": max(0, extra), "tensors": 2 * new}
    return list(rows.values()), made


def measure_all(
    program: str, cases: Sequence[Case], options: argparse.Namespace, longest_call: float, **facts: Any
) -> dict[str, Any]:
    """Measures the cases in order, and writes the record after each one; returns it, with `facts` in it."""
    implementations = all_implementations(options.rules, options.device)
    budget, clock = Budget(options.budget), clock_for(options.device)
    rates = measure_rates(options.device, {c.dtype: DTYPES[c.dtype] for c in cases}, clock, options.quick)
    rows: list[Row] = []
    facts |= {"rates": rates, "cut": budget.cut, "rows": rows}
    setting = {"device": options.device, "clock": clock, "rates": rates, "rounds": options.rounds}
    for number, case in enumerate(cases):
        if budget.left <= 0:
            budget.cut.append(f"{case}: not measured")
            continue
        allowed = budget.share(len(cases) - number)
        found, made = compare(case, implementations, **setting, allowed=allowed, longest_call=longest_call)
        rows += found
        if made < options.rounds:
            budget.cut.append(f"{case}: {made} rounds of {options.rounds}")
        print(f"{case}: {made} rounds", file=sys.stderr, flush=True)
        records.save(program, options, **facts)
    return records.save(program, options, **facts)
