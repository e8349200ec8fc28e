"""Comparisons: all implementations of a case take turns, one case after the other, within a budget; lower bounds."""

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
from harness.cases import DTYPES, RULES, Inputs, Shape, draw_inputs
from harness.implementations import Implementation, Refusal, Work, all_implementations
from harness.pages import brief
from harness.timing import Budget, Call, Clock, clock_for, first_calls, peak, time_in_turns

# Relative error, by norms, up to which outputs agree: far above rounding, far below a mistake.
AGREEMENT = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}

Row = dict[str, Any]


# Multiplications and additions per entry of the state and step, of the recurrence one step at a time. Forward: S is
# written and read; backward: S once more (inner states are not kept), then the gradients:
#   sum    S += k v, y = S q;  S += k v, dq = S dy, dS += q dy, dk = dS v, dv = dS k
#   a decay     and g S; g S, g dS, dg = dS . S
#   two decays  and f z S; f z S, f z dS, df and dz from P = dS . S
#   correcting  and S k; S k, dk takes S du too, dv = du = dS k, dS -= k du
# A chunked form does other operations: this is one yardstick for all.
def operations_of(rule: str) -> tuple[int, int]:
    """The numbers of a rule, forward and backward."""
    decays, corrects = sum(gate.log for gate in RULES[rule].gates), RULES[rule].corrects
    return 4 + decays + 2 * corrects, 10 + (1 + 3 * decays if decays else 0) + 6 * corrects


_COPY_BYTES = (4 << 20, 16 << 20, 64 << 20, 256 << 20)


def measure_rates(device: str, dtypes: dict[str, torch.dtype], clock: Clock, quick: bool = False) -> dict[str, Any]:
    """Measures this machine.

    "copy": bytes per second of a copy, by its bytes read and written ("268435456"); "matmul": operations per second of
    a square matrix product by dtype, float32 in full precision.
    """
    sizes = _COPY_BYTES[:1] if quick else (4 << 30,) if device == "cuda" else _COPY_BYTES  # a GPU's: beyond its cache
    copies, products = {}, {}
    for size in sizes:
        source = torch.rand(size // 8, device=device)
        target = torch.empty_like(source)
        copies[str(size)] = size / _best(lambda s=source, t=target: t.copy_(s), clock, quick)
    width = 128 if quick else 8192 if device == "cuda" else 2048
    torch.set_float32_matmul_precision("highest")  # torch's default
    for name, dtype in dtypes.items():
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in "ab")
        products[name] = 2 * width**3 / _best(lambda a=a, b=b: a @ b, clock, quick)
    return {"copy": copies, "matmul": products}


def _best(call: Any, clock: Clock, quick: bool) -> float:
    """The least time of at least three calls, and of as many as fit in half a second."""
    call()
    end = time.perf_counter() + (0.05 if quick else 0.5)
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() < end:
        times.append(clock.seconds(call, 1))
    return min(times)


def limit_of(shape: Shape, rule: str, dtype: str, kind: str, inputs: Inputs, rates: dict[str, Any]) -> dict[str, Any]:
    """The least that a case takes on a machine of these rates. `rule` may be "softmax".

    "bytes", every input read once per pass, every output and gradient written once, a step's state both;
    "operations", by `operations_of`, for softmax attention its matrix products over the causal half; "seconds", the
    larger of bytes over bandwidth and operations over rate; "binding", which it is: "bandwidth" or "arithmetic".
    """
    softmax, both = rule == "softmax", kind == "forward+backward"
    read = (inputs.wide_q, inputs.wide_k, inputs.v) if softmax else (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])
    given, out = sum(x.nbytes for x in read), inputs.d_out.nbytes
    # Backward reads the inputs again and the output's gradient, and writes a gradient for each input.
    moved = 3 * given + 2 * out if both else given + out
    moved += 0 if inputs.state is None else 2 * inputs.state.nbytes
    if softmax:
        # Two products forward, five backward (the scores once more), each over the pairs on and below the diagonal.
        operations = shape.time * (shape.time + 1) // 2 * 2 * shape.value_dim * (7 if both else 2)
    else:
        operations = shape.time * shape.key_dim * shape.value_dim * sum(operations_of(rule)[: 1 + both])
    operations *= shape.batch * shape.heads
    # The rate of the measured copy whose size is next to this: a small one stays in the caches, as small inputs do.
    size = min(rates["copy"], key=lambda size: abs(math.log(int(size) / moved)))
    times = {"bandwidth": moved / rates["copy"][size], "arithmetic": operations / rates["matmul"][dtype]}
    binding = max(times, key=lambda name: (times[name], name))
    return {"bytes": moved, "operations": operations, "seconds": times[binding], "binding": binding}


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
            # The first call of a compiled peer is no measure of the others.
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
    references.clear()  # their memory would count

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
        # After each case, so that a program that is stopped leaves its results.
        records.save(program, options, **facts)
    return records.save(program, options, **facts)
