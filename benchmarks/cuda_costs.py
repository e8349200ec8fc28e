"""Fits what the chunked CUDA kernels cost to the times of all plans: the numbers that `Costs` in the kernels hold.

    python benchmarks/cuda_costs.py [plans.csv]

The file is what benchmarks/cuda_plans.py --out writes; by default, the one of an H200 that is in the repository. For
each kernel that goes through chunks one after another, with and without a gate, in bfloat16 and in float32, it prints
the numbers in the order of `Costs`, and by how much a call takes longer, on average and at most, with the plan that
they say is the fastest than with the one that was.
"""

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cuda_plans import NUMBERS
from harness import ROOT
from harness.cases import SHAPES
from scipy.optimize import least_squares

PLANS = ROOT / "benchmarks" / "results" / "nvidia-h200-plans.csv"
PROCESSORS, CYCLES_OF_A_MILLISECOND = 132, 1.755e6  # of an H200
# As cuda/chunked/plan.h has them: cycles of a launch, of a carry, and of one that it goes on to; waiting with 128
# threads over that with 256; and waiting for inputs that are not on their way before.
LAUNCH, CARRY, CARRY_OVER, FEW_THREADS, ONE_STAGE = 4000, 6000, 600, 1.15, 500
# Where a fit begins, and what it may not leave. Numbers that the times say little of stay near where they began.
FORWARD, BACKWARD = (1000, 3, 4, 3000, 60, 0.5), (3000, 15, 12, 10000, 20, 0.4)
LEAST, MOST = (100, 0.3, 0.3, 300, 1, 0.25), (20000, 60, 60, 40000, 400, 1.1)
FAMILIES = {
    "sum": "diagonal",
    "gated": "diagonal",
    "decay": "decays",
    "delta": "delta",
    "gated_delta": "delta",
    "kimi_delta": "delta_decays",
}


class Plan(NamedTuple):
    """A row of the file that has a plan."""

    shape: str
    dtype: str
    rule: str
    backward: bool
    interval: int
    chunk: int
    columns: int
    blocks: int
    stages: int
    threads: int
    segments: int
    at_once: int
    milliseconds: float

    def swept(self) -> float:
        """Chunks that are worked through again for each, backwards: `Sweep` in cuda/chunked/plan.h."""
        chunks = math.ceil(min(SHAPES[self.shape].time, self.interval) / self.chunk)
        spacing = 1
        while spacing**2 < chunks:
            spacing *= 2
        if chunks <= 4:
            return (chunks - 1) / 2
        return (chunks - 1 + sum(i % spacing for i in range(chunks - 1))) / chunks


def cycles(costs: Sequence[float], plan: Plan) -> float:
    """The cycles of a plan, as `cycles_of` in cuda/chunked/segments.cuh counts them."""
    of_chunk, row, product, waiting, waiting_of_step, of_first = costs
    shape = SHAPES[plan.shape]
    heads, keys = shape.batch * shape.heads, math.ceil(shape.key_dim / 16) * 16
    chunks = math.ceil(math.ceil(shape.time / plan.chunk) / plan.segments)
    rows = row * plan.chunk * (keys + plan.columns) / 8 + product * plan.chunk * keys * plan.columns / 512
    work = of_chunk + (1 + 0.3 * (plan.swept() if plan.backward else 0)) * rows
    waits = (waiting + waiting_of_step * plan.chunk) * (FEW_THREADS if plan.threads == 128 else 1)
    waits += 0 if plan.backward or plan.stages == 2 else ONE_STAGE

    def launch(blocks: int) -> float:
        whole, rest = divmod(blocks, PROCESSORS * plan.at_once)
        together = [max(n * work, work + waits) if n else 0 for n in (plan.at_once, math.ceil(rest / PROCESSORS))]
        return LAUNCH + chunks * (whole * together[0] + together[1])

    last = plan.blocks * launch(plan.segments * heads) if plan.backward else launch(plan.segments * heads * plan.blocks)
    if plan.segments == 1:
        return last
    identity = math.ceil(shape.key_dim / plan.columns) if "delta" in plan.rule else 0
    first = launch((plan.segments - 1) * heads * (plan.blocks + identity)) - LAUNCH
    return LAUNCH + of_first * first + CARRY + CARRY_OVER * plan.segments + last


def read(path: Path) -> dict[tuple[str, str, str], list[Plan]]:
    """The plans by kernel, gate and dtype."""
    groups: dict[tuple[str, str, str], list[Plan]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            if not row["chunk"] or row["walk"] != "0":
                continue
            numbers = (int(row[name]) for name in ("interval", *NUMBERS) if name != "walk")
            backward = row["pass"] == "backward"
            plan = Plan(row["shape"], row["dtype"], row["rule"], backward, *numbers, float(row["ms"]))
            gate = "gated" if "gated" in plan.rule else ""
            groups.setdefault((f"{FAMILIES[plan.rule]}_{row['pass']}", gate, plan.dtype), []).append(plan)
    return groups


def fit(plans: Sequence[Plan]) -> list[float]:
    """The fit whose choices lose the least, among fits that weigh slow plans, and large errors, more or less."""
    fits = (fit_logarithms(plans, power, scale) for power in (1, 2, 3) for scale in (0.15, 0.05))
    return min(fits, key=lambda costs: float(np.mean(losses(costs, plans))))


def fit_logarithms(plans: Sequence[Plan], power: int, scale: float) -> list[float]:
    """The costs, of two digits, whose logarithms are the nearest. A plan that takes twice as long as the fastest counts
    2^-power, and what is farther off than `scale` less than by its square."""
    fastest: dict[str, float] = {}
    for plan in plans:
        fastest[plan.shape] = min(plan.milliseconds, fastest.get(plan.shape, math.inf))
    weights = np.array([fastest[plan.shape] / plan.milliseconds for plan in plans]) ** power
    measured = np.log([plan.milliseconds * CYCLES_OF_A_MILLISECOND for plan in plans])
    least, start, most = (np.log(x) for x in (LEAST, BACKWARD if plans[0].backward else FORWARD, MOST))

    def residuals(logs: np.ndarray) -> np.ndarray:
        found = np.log([cycles(np.exp(logs), plan) for plan in plans])
        return np.concatenate([weights * (found - measured), 0.05 * (logs - start)])

    found = least_squares(residuals, start, loss="soft_l1", f_scale=scale, bounds=(least, most))
    return [float(f"{x:.2g}") for x in np.exp(found.x)]


def losses(costs: Sequence[float], plans: Sequence[Plan]) -> list[float]:
    """By call, the time of the plan that costs the least over that of the fastest."""
    calls: dict[tuple[str, str], list[Plan]] = {}
    for plan in plans:
        calls.setdefault((plan.shape, plan.rule), []).append(plan)
    chosen = (min(ways, key=lambda plan: cycles(costs, plan)).milliseconds for ways in calls.values())
    return [ms / min(plan.milliseconds for plan in ways) for ms, ways in zip(chosen, calls.values(), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="?", type=Path, default=PLANS, help="(default: %(default)s)")
    for key, plans in read(parser.parse_args().plans).items():
        costs = fit(plans)
        lost = losses(costs, plans)
        numbers = ", ".join(f"{x:g}" for x in costs)
        print(f"{' '.join(filter(None, key)):<36} {{{numbers}}}  {np.mean(lost) - 1:.1%}, {max(lost) - 1:.0%}")


if __name__ == "__main__":
    main()
