"""All plans of the CUDA kernels for a call, timed in turns: the cost of their choice by estimate.

    python benchmarks/cuda_plans.py [--shapes retnet long ...] [--rules delta ...] [--budget 60] [--out plans.csv]

At each shape, rule and pass every plan of the chunked kernels, the one that they choose with other numbers of segments,
and the recurrent kernels take turns (A B C A B C ...). The costs that the kernels choose by (`WalkCosts` in
cuda/chunked/passes.cuh) are held against the medians, which --out writes, by tests/cuda/test_choice.py.
"""

import csv
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from harness.cases import DTYPES, RULES, SHAPES, Inputs, Shape, draw_inputs
from harness.comparison import AGREEMENT
from harness.pages import markdown, median, milliseconds, ratio
from harness.program import make_parser
from harness.timing import Budget, clock_for, first_calls, time_in_turns

from fairseq_fastweights.ops import kernels

ALGORITHM, PLAN = "FASTWEIGHTS_CUDA_ALGORITHM", "FASTWEIGHTS_CUDA_PLAN"
# Requests; those that are no plan of a call are left out.
CHOICES = {"columns": (16, 32, 64), "stages": (1, 2, 4)}
DEVICE = "cuda"
SEGMENTS = (1, 2, 4, 8, 16, 32, 64)
# The numbers of a plan in a row of the file.
NUMBERS = ("columns", "blocks", "stages", "threads", "segments")

Row = dict[str, Any]


class Way(NamedTuple):
    """A way to do a call: the plan in full, None for step by step, and the environment that requests it."""

    plan: dict[str, int] | None
    environment: dict[str, str]

    def __str__(self) -> str:
        if self.plan is None:
            return "recurrent"
        text = "{columns} values, stages {stages}, threads {threads}, segments {segments}"
        return text.format(**self.plan).removesuffix(", segments 1")


class Call(NamedTuple):
    """A pass of a rule; the operator that it comes down to, and batch, time, heads, key_dim, value_dim and interval."""

    run: Callable[[], Any]
    rule: str
    operation: str
    sizes: tuple[int, ...]
    dtype: torch.dtype


def call_of(shape: Shape, rule: str, kind: str, inputs: Inputs) -> Call:
    """A pass of a rule as training makes it: forward keeps states, one for each interval, and backward reads them."""
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])]
    run = partial(RULES[rule], *leaves, backend="native")
    if kind == "backward":
        run = partial(torch.autograd.grad, run()[0], leaves, inputs.d_out, retain_graph=True)
    interval = kernels._interval(inputs.k, inputs.v)
    sizes = (shape.batch, shape.time, shape.heads, shape.key_dim, shape.value_dim, interval)
    return Call(run, rule, f"{'delta' if 'delta' in rule else 'diagonal'}_{kind}", sizes, inputs.v.dtype)


def ways_of(call: Call, capability: tuple[int, int]) -> list[Way]:
    """The ways to do a call, first the one that is taken if nobody asks; other segments for the ordinary plan alone."""
    kind = {"gated": "gated" in call.rule, "separate_decays": {"decay": 2, "kimi_delta": 1}.get(call.rule, 0)}

    def found(**environment: str) -> Way:
        with mock.patch.dict(os.environ, environment):
            return Way(kernels.cuda_plan(call.operation, call.sizes, call.dtype, capability, **kind), environment)

    ways = [found(), found(**{ALGORITHM: "recurrent"}), found(**{ALGORITHM: "chunked"})]
    plans = [dict(zip(CHOICES, numbers, strict=True)) for numbers in itertools.product(*CHOICES.values())]
    if (ordinary := ways[2].plan) is not None:
        plans += [{**{name: ordinary[name] for name in CHOICES}, "segments": segments} for segments in SEGMENTS]
    # A plan that is not possible falls back to step by step, which is there already.
    texts = [" ".join(f"{name}={number}" for name, number in plan.items()) for plan in plans]
    return ways + [found(**{ALGORITHM: "chunked", PLAN: text}) for text in texts]


def measure(shape: Shape, rule: str, kind: str, dtype: torch.dtype, rounds: int, allowed: float) -> list[Row]:
    """A row for each way to do a call; "difference", by norms, is that of its results from those step by step."""
    call = call_of(shape, rule, kind, draw_inputs(shape, dtype, DEVICE))
    ways: dict[str, Way] = {}
    for way in ways_of(call, torch.cuda.get_device_capability()):
        ways.setdefault(str(way), way)
    # `patch.dict` as a decorator sets the request for the duration of each call.
    calls = {label: mock.patch.dict(os.environ, way.environment)(call.run) for label, way in ways.items()}
    # The recurrent kernels are the measure of all plans' results.
    expected = [x.detach().double() for x in calls["recurrent"]()]
    differences = {
        label: max(((x - y).norm() / y.norm()).item() for x, y in zip(make(), expected, strict=True))
        for label, make in calls.items()
    }
    warm = {label: first_calls(make, torch.cuda.synchronize)[1:] for label, make in calls.items()}
    measured, _ = time_in_turns(calls, warm, clock_for(DEVICE), rounds, allowed)
    common = {"dtype": str(dtype).removeprefix("torch."), "shape": shape.name, "rule": rule, "pass": kind}
    common["interval"] = call.sizes[-1]
    rows = [
        {**common, "way": label, "plan": way.plan, "seconds": measured[label], "difference": differences[label]}
        for label, way in ways.items()
    ]
    return [row | {"chosen": row is rows[0]} for row in rows]


def write(rows: Sequence[Row], path: Path) -> None:
    """A line for each plan of a call, with medians in milliseconds; the file is there whole or not at all."""
    names = ("dtype", "shape", "rule", "pass", "interval")
    new = path.with_name(f".{path.name}.new")
    with new.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*names, "recurrent ms", *NUMBERS, "ms"])
        recurrent = {tuple(row[name] for name in names): row for row in rows if row["plan"] is None}
        for row in rows:
            if row["plan"] is not None:
                call = tuple(row[name] for name in names)
                steps, chunks = (f"{median(way) * 1e3:.4g}" for way in (recurrent[call], row))
                writer.writerow([*call, steps, *(row["plan"][number] for number in NUMBERS), chunks])
    new.replace(path)


def render(rows: list[Row]) -> str:
    """By call: the chosen plan, the fastest one, and the time of the former over that of the latter."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['shape']}, {row['rule']}, {row['pass']}", []).append(row)
    lines = []
    for call, ways in groups.items():
        pair = next(row for row in ways if row["chosen"]), min(ways, key=median)
        times = [median(row) for row in pair]
        lines.append([call, *(row["way"] for row in pair), *map(milliseconds, times), ratio(times[0] / times[1])])
    return markdown(["call", "chosen", "fastest", "chosen", "fastest", "chosen over fastest"], lines, left=3)


def main() -> None:
    shapes = [name for name, shape in SHAPES.items() if not shape.steps]  # of whole sequences
    parser = make_parser(__doc__, "--budget", "--rounds", rounds=5, shapes=shapes, rules=RULES)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the medians to this CSV file")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="default: %(default)s")
    parser.set_defaults(device="cuda")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU, and there is nothing to choose on a CPU")

    for name in (ALGORITHM, PLAN):
        os.environ.pop(name, None)  # requests of the shell
    budget = Budget(options.budget)
    rows: list[Row] = []
    cases = list(itertools.product(options.shapes, options.rules, ("forward", "backward")))
    for number, (name, rule, kind) in enumerate(cases):
        if budget.left <= 0:
            budget.cut.append(f"{name}, {rule}, {kind}: not measured")
            continue
        rows += measure(
            SHAPES[name], rule, kind, DTYPES[options.dtype], options.rounds, budget.share(len(cases) - number)
        )
        if options.out is not None:
            write(rows, options.out)
    print(render(rows))
    print(*budget.cut, sep="\n")
    if wrong := [row for row in rows if not row["difference"] <= AGREEMENT[row["dtype"]]]:
        where = ("{shape}, {rule}, {pass}, {way}: by {difference:.2g}".format(**row) for row in wrong)
        sys.exit("\n".join(["error: these differ from the results of the recurrent kernels", *where]))


if __name__ == "__main__":
    main()
