"""Comparisons: all contestants at a shape, dtype and pass, in turns; one case after the other, within a budget."""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness import contestants as known
from harness import records
from harness.cases import DTYPES, Pass, Shape, draw_inputs
from harness.contestants import Contestant, Refusal, Work
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
    kind: Pass

    def __str__(self) -> str:
        return f"{self.shape.name}, {self.dtype}, {self.kind}"


def all_contestants(options: argparse.Namespace) -> list[Contestant]:
    """Everybody who does the chosen rules on the chosen device."""
    found = [*known.our_rules(options.rules), *known.softmax_attention()]
    if options.device == "cuda":
        return found + known.flash_linear_attention(options.rules)
    return found + (known.causal_product(options.peers) if "sum" in options.rules else [])


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
    """Measures all contestants that can take part.

    One that compiles is not begun after `compiling` seconds, one whose call takes longer than `longest_call` left out.
    Returns a row for each, with "status" "measured", "unavailable", "failed" or "left out", and the number of rounds.
    """
    began = time.perf_counter()
    shape, both = case.shape, case.kind == "forward+backward"
    inputs = draw_inputs(shape, DTYPES[case.dtype], device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    sizes = {name: getattr(shape, name) for name in ("batch", "heads", "time", "key_dim", "value_dim")}
    rows: dict[str, Row] = {}
    ready: dict[str, tuple[Work, Call, float]] = {}
    references: dict[str, Tensor] = {}
    # Chunkwise, which is there on every machine, says what is right; it is asked first, and measured in its turn.
    for contestant in sorted(contestants, key=lambda c: c.name != "chunkwise"):
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
            ready[contestant.label] = work, call, host
        except Refusal as reason:
            if not reason.args:
                continue
            row["status"], row["message"] = reason.args
        except Exception as error:  # a peer's errors are results, whatever they are
            text = " ".join(f"{type(error).__name__}: {error}".split())
            row |= {"status": "failed", "message": text if len(text) <= 200 else f"{text[:197]}..."}
        rows[contestant.label] = row
    references.clear()

    labels = [contestant.label for contestant in contestants if contestant.label in rows]
    turns = {label: ready[label][1] for label in labels if label in ready}
    warm, hosts = {label: rows[label]["second call"] for label in turns}, {label: ready[label][2] for label in turns}
    left = max(allowed - (time.perf_counter() - began), 0.0)
    measured, made = time_in_turns(turns, warm, clock, hosts=hosts, rounds=rounds, allowed=left)
    for label, seconds in measured.items():
        limit = limit_of(shape, rows[label]["rule"], case.dtype, case.kind, inputs, rates)
        rows[label] |= {"status": "measured", "seconds": seconds, "limit": limit}
        if device == "cuda" and both:
            # Bytes, "extra" beyond inputs, output and the gradients of both, "tensors" of all these. The output's
            # gradient is there before, the output and the inputs' gradients come with the call.
            work = ready[label][0]
            new = sum(x.nbytes for x in (*work.inputs, work.d_out))
            extra = peak(lambda work=work: work, Work.run_both, device) - new
            rows[label]["memory"] = {"extra": max(0, extra), "tensors": 2 * new}
    return [rows[label] for label in labels], made


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
    `make_record` makes the record of the machine's rates, what was cut to keep to the budget, and the rows.
    """
    budget = Budget(options.budget)
    clock = clock_for(options.device)
    rates = measure_rates(options.device, {c.dtype: DTYPES[c.dtype] for c in cases}, clock, options.quick)
    rows: dict[int, list[Row]] = {}
    cut: dict[int, str] = {}

    def record_so_far() -> dict[str, Any]:
        flat = [row for number in sorted(rows) for row in rows[number]]
        return make_record(rates=rates, cut=[cut[number] for number in sorted(cut)], rows=flat)

    def measure(number: int, parts: int, compiling: float) -> None:
        case, before = cases[number], rows.get(number, [])
        setting = {"device": options.device, "clock": clock, "rates": rates, "rounds": options.rounds}
        limits = {"allowed": budget.share(parts), "compiling": compiling, "longest_call": longest_call}
        rows[number], made = compare(case, contestants, **setting, **limits)
        # The first call in this process is the one of the run before.
        for row, old in itertools.product(rows[number], before):
            if (old["implementation"], old["rule"]) == (row["implementation"], row["rule"]):
                row |= {name: old[name] for name in ("first call", "second call") if name in old}
        cut.pop(number, None)
        if made < options.rounds:
            cut[number] = f"{case}: {made} rounds of {options.rounds}"
        done = [row for row in rows[number] if row["status"] == "measured"]
        medians = (f"{row['implementation']} {row['rule']} {row['seconds']['median'] * 1e3:.3g}" for row in done)
        print(f"{case}: {', '.join(medians)} ms", file=sys.stderr, flush=True)
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
    return record_so_far()
