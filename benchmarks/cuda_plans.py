"""The ways in which the CUDA kernels can do a call, against each other: what their choice by estimate loses.

    python benchmarks/cuda_plans.py [--shapes LIST] [--rules LIST] [--budget 60] [--out plans.json]

At each shape, rule and pass every plan of the chunked kernels, the one that they choose with other numbers of segments,
and the recurrent kernels take turns (A B C A B C ...). What the estimates in cuda/choice.cu and cuda/chunked_plan.h
should say can be read off the results.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import records
from harness.cases import DTYPES, RULES, SHAPES, draw_inputs
from harness.measuring import duration, list_of, positive
from harness.plan_sweep import WAYS, asking, call_of, ways_of
from harness.tables import markdown, milliseconds, ratio
from harness.timing import Budget, CudaClock, first_calls, time_in_turns

# What the chunked kernels are for comes first.
ORDER = ("retnet", "long", "mt-big", "baevski-64", "attention", "mt-big-256", "mt-big-512", "gpt2-32", "lm-medium")
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = shapes_in_order()
    parser.add_argument(
        "--shapes", type=list_of("shapes", shapes), default=shapes, metavar="LIST", help=f"of {','.join(shapes)}"
    )
    parser.add_argument(
        "--rules", type=list_of("rules", RULES), default=RULES, metavar="LIST", help=f"of {','.join(RULES)}"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=positive, default=ROUNDS, help="times that each is measured (default: %(default)s)"
    )
    parser.add_argument("--budget", type=duration, metavar="SECONDS", help="cut rounds, then calls, to take no longer")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU, and there is nothing to choose on a CPU")

    budget = Budget(options.budget)
    make_record = partial(records.describe_run, "cuda_plans", "cuda")
    rows: list[dict[str, Any]] = []
    cases = list(itertools.product(options.shapes, options.rules, WAYS))
    for number, (name, rule, way) in enumerate(cases):
        if budget.left <= 0:
            budget.cut.append(f"{name}, {rule}, {way}: not measured")
            continue
        rows += measure(name, rule, way, DTYPES[options.dtype], options.rounds, budget.share(len(cases) - number))
        if options.out is not None:
            records.write(make_record(cut=budget.cut, rows=rows), options.out)
    print(render(rows))
    for line in budget.cut:
        print(f"- cut to keep to the budget: {line}")


def shapes_in_order() -> list[str]:
    """All shapes of whole sequences."""
    shapes = [name for name, shape in SHAPES.items() if not shape.steps]
    return sorted(shapes, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def measure(name: str, rule: str, way: str, dtype: torch.dtype, rounds: int, allowed: float) -> list[dict[str, Any]]:
    """A row for each way to do a call."""
    shape = SHAPES[name]
    call = call_of(shape, rule, way, draw_inputs(shape, dtype, "cuda"))
    ways = ways_of(call, torch.cuda.get_device_capability())

    def asked(environment: dict[str, str]) -> Any:
        with asking(environment):
            return call.run()

    calls = {str(way): partial(asked, way.environment) for way in ways}
    first = {label: first_calls(make, torch.cuda.synchronize) for label, make in calls.items()}
    warm, hosts = ({label: seconds[i] for label, seconds in first.items()} for i in (1, 2))
    measured, _ = time_in_turns(calls, warm, CudaClock(), hosts=hosts, rounds=rounds, allowed=allowed)
    return [
        {
            "shape": name,
            "rule": rule,
            "operation": call.operation,
            "sizes": dict(zip(("batch", "time", "heads", "key_dim", "value_dim", "interval"), call.sizes, strict=True)),
            "way": str(way),
            "plan": way.plan,
            "chosen": way is ways[0],
            "seconds": measured[str(way)],
        }
        for way in ways
    ]


def render(rows: list[dict[str, Any]]) -> str:
    """By call: what is chosen, what is the fastest, and how many times as long the former takes."""
    lines = []
    for (shape, operation, rule), group in itertools.groupby(
        rows, key=lambda row: (row["shape"], row["operation"], row["rule"])
    ):
        ways = list(group)
        chosen = next(row for row in ways if row["chosen"])
        best = min(ways, key=lambda row: row["seconds"]["median"])
        medians = [row["seconds"]["median"] for row in (chosen, best)]
        times = [milliseconds(median) for median in medians]
        passed = operation.partition("_")[2]
        lines.append([f"{shape}, {rule}, {passed}", chosen["way"], best["way"], *times, ratio(medians[0] / medians[1])])
    return markdown(["call", "chosen", "fastest", "chosen", "fastest", "chosen over fastest"], lines, left=3)


if __name__ == "__main__":
    main()
