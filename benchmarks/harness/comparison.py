"""Comparisons: all contestants at a shape, dtype and pass, in turns; one case after the other, within a budget."""

import argparse
import itertools
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
from harness.contestants import Contestant, Refusal, Work, all_contestants, build_record
from harness.limits import limit_of, measure_rates
from harness.memory import peak
from harness.timing import Budget, Call, Clock, clock_for, first_calls, time_in_turns

# Contestants that say they compute the same must agree to this, by norms: far above rounding, far below a mistake.
AGREEMENT = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}

# What a row says of who was not compiled.
NOT_COMPILED = "no time was left in the budget"

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
    """Measures all contestants that can take part; the first of a rule says what is right.

    One that compiles is not begun after `compiling` seconds, one whose call takes longer than `longest_call` left out.
    Returns a row for each, with "status" "measured", "unavailable", "failed" or "left out", and the number of rounds.
    """
    began = time.perf_counter()
    shape, both = case.shape, case.kind == "forward+backward"
    inputs = draw_inputs(shape, DTYPES[case.dtype], device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    sizes = {name: getattr(shape, name) for name in ("batch", "heads", "time", "key_dim", "value_dim")}
    rows: dict[str, Row] = {}
    works: dict[str, Work] = {}
    calls: dict[str, Call] = {}
    hosts: dict[str, float] = {}
    references: dict[str, Tensor] = {}
    for contestant in contestants:
        label = f"{contestant.name} {contestant.rule}"
        row: Row = {"shape": shape.name, "sizes": sizes, "dtype": case.dtype, "pass": case.kind}
        row |= {"implementation": contestant.name, "rule": contestant.rule}
        try:
            work = contestant.prepare(shape, inputs)
            if contestant.compiles and time.perf_counter() - began >= compiling:
                raise Refusal("left out", NOT_COMPILED)
            call = work.run_both if both else work.run_forward
            row["first call"], row["second call"], host = first_calls(call, synchronize, longest_call)
            if row["first call"] > longest_call:
                raise Refusal("left out", f"a call takes {row['first call']:.1f} s, over {longest_call:g} s")
            if contestant.same:
                out = work.as_reference(work.run_forward()).float()
                reference = references.setdefault(contestant.rule, out)
                row["difference"] = ((out - reference).norm() / reference.norm()).item()
                if not row["difference"] <= AGREEMENT[case.dtype]:
                    raise Refusal("failed", f"wrong: its output differs by {row.pop('difference'):.2g}")
            works[label], calls[label], hosts[label] = work, call, host
        except Refusal as reason:
            if not reason.args:
                continue
            row["status"], row["message"] = reason.args
        except Exception as error:  # a peer's errors are results, whatever they are
            text = " ".join(f"{type(error).__name__}: {error}".split())
            row |= {"status": "failed", "message": text if len(text) <= 200 else f"{text[:197]}..."}
        rows[label] = row
    references.clear()

    warm = {label: rows[label]["second call"] for label in calls}
    left = max(allowed - (time.perf_counter() - began), 0.0)
    measured, made = time_in_turns(calls, warm, clock, hosts=hosts, rounds=rounds, allowed=left)
    for label, seconds in measured.items():
        limit = limit_of(shape, rows[label]["rule"], case.dtype, case.kind, inputs, rates)
        rows[label] |= {"status": "measured", "seconds": seconds, "limit": limit}
        if device == "cuda" and both:
            # Bytes, "extra" beyond inputs, output and the gradients of both, "tensors" of all these. The output's
            # gradient is there before, the output and the inputs' gradients come with the call.
            work = works[label]
            new = sum(x.nbytes for x in (*work.inputs, work.d_out))
            extra = peak(lambda work=work: work, Work.run_both, device) - new
            rows[label]["memory"] = {"extra": max(0, extra), "tensors": 2 * new}
    return list(rows.values()), made


def measure_all(
    program: str, cases: Sequence[Case], options: argparse.Namespace, longest_call: float, **facts: Any
) -> dict[str, Any]:
    """Measures the cases in order, and writes what there is after each of them: who is stopped leaves that much.

    Contestants that compile could use up a budget at the first cases. Under one all cases are measured without them,
    and then, while time is left, again with them: such a run of all contestants takes the place of the one before.
    Returns the record of `program`, with `facts` in it.
    """
    contestants = all_contestants(options.rules, options.device)
    budget, clock = Budget(options.budget), clock_for(options.device)
    rates = measure_rates(options.device, {c.dtype: DTYPES[c.dtype] for c in cases}, clock, options.quick)
    facts |= {"causal_product": build_record(), "rates": rates}
    rows: dict[int, list[Row]] = {}
    cut: dict[int, str] = {}

    def save() -> dict[str, Any]:
        found = {"cut": [cut[n] for n in sorted(cut)], "rows": [row for case in rows.values() for row in case]}
        return records.save(program, options, **facts, **found)

    longest, queue = 0.0, list(range(len(cases)))
    while queue:
        number = queue.pop(0)
        case, before, left = cases[number], rows.get(number), budget.left
        if left <= (0.0 if before is None else longest):  # it would end too late
            if before is None:
                cut[number] = f"{case}: not measured"
            continue
        compiling = math.inf if options.budget is None else 0.0 if before is None else left
        setting = {"device": options.device, "clock": clock, "rates": rates, "rounds": options.rounds}
        limits = {"allowed": budget.share(len(queue) + 1), "compiling": compiling, "longest_call": longest_call}
        rows[number], made = compare(case, contestants, **setting, **limits)
        # The first call in this process is the one of the run before.
        for row, old in itertools.product(rows[number], before or []):
            if (old["implementation"], old["rule"]) == (row["implementation"], row["rule"]):
                row |= {name: old[name] for name in ("first call", "second call") if name in old}
        cut.pop(number, None)
        if made < options.rounds:
            cut[number] = f"{case}: {made} rounds of {options.rounds}"
        if before is not None:
            longest = max(longest, left - budget.left)
        elif any(row.get("message") == NOT_COMPILED for row in rows[number]):
            queue.append(number)
        done = [row for row in rows[number] if row["status"] == "measured"]
        medians = (f"{row['implementation']} {row['rule']} {row['seconds']['median'] * 1e3:.3g}" for row in done)
        print(f"{case}: {', '.join(medians)} ms", file=sys.stderr, flush=True)
        save()
    return save()
