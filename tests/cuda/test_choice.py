"""Which algorithm the binding runs for which inputs."""

from __future__ import annotations

import csv
import re
import sys
from itertools import product

import pytest
import torch

from tests.conftest import ROOT
from tests.cuda.emulated import DTYPES, OPERATIONS

sys.path.append(str(ROOT / "benchmarks"))  # as when its programs are started
import cuda_costs
from harness.cases import SHAPES

BF16, SIZES = torch.bfloat16, (2, 4096, 4, 64, 64, 64)
# Why, sizes, dtype, compute capability, and what is taken.
CHOICES = [
    ("no tensor core multiplies float64 here", SIZES, torch.float64, 90, "recurrent"),
    *[("no bfloat16 before 8.0", SIZES, BF16, capability, "recurrent") for capability in (70, 75)],
    ("too short", (2, 9, 4, 64, 64, 64), BF16, 90, "recurrent"),
    *[("long", (1, 16384, 8, 64, 64, 64), BF16, capability, "chunked") for capability in (80, 90)],
]


def sizes_and_gates(row):
    """The operation, sizes and dtype of a row of the file, and what else `plan` and `choose` ask for."""
    shape = SHAPES[row["shape"]]
    operation = f"{'delta' if 'delta' in row['rule'] else 'diagonal'}_{row['pass']}"
    sizes = (shape.batch, shape.time, shape.heads, shape.key_dim, shape.value_dim, int(row["interval"]))
    gates = {"gated": "gated" in row["rule"], "separate_decays": {"decay": 2, "kimi_delta": 1}.get(row["rule"], 0)}
    return (operation, sizes, getattr(torch, row["dtype"])), gates


def test_the_choice_was_the_fastest_on_an_h200_or_a_quarter_slower(emulator, monkeypatch):
    """For 188 calls by chunks one after another, of which three choices were not measured: those that fit only without
    gates, and numbers of segments; and for those that were also measured side by side, with one plan."""
    calls: dict[tuple, dict[tuple, float]] = {}
    with cuda_costs.PLANS.open() as file:
        for row in csv.DictReader(file):
            call = tuple(row[name] for name in ("dtype", "shape", "rule", "pass", "interval"))
            numbers = ("walk",) if row["walk"] == "1" else tuple(row[name] for name in cuda_costs.NUMBERS)
            calls.setdefault(call, {})[numbers] = float(row["ms"])
    for request, most, measured, mean in (("walk=-1", 1.25, 185, 1.02), ("", 1.2, 150, 1.02)):
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", request)
        lost = []
        for call, times in calls.items():
            asked, gates = sizes_and_gates(dict(zip(("dtype", "shape", "rule", "pass", "interval"), call, strict=True)))
            if request:
                times = {numbers: ms for numbers, ms in times.items() if numbers != ("walk",)}
            elif ("walk",) not in times or len(times) == 1:
                continue
            chosen = ("",) * len(cuda_costs.NUMBERS)
            if emulator.choose(*asked, **gates) == "chunked":
                plan = emulator.plan(*asked, **gates)
                chosen = ("walk",) if plan.walk else tuple(str(getattr(plan, name)) for name in cuda_costs.NUMBERS)
            if chosen in times:
                lost.append(times[chosen] / min(times.values()))
                assert lost[-1] < most, (call, chosen)
        assert len(lost) >= measured and sum(lost) / len(lost) < mean


@pytest.mark.parametrize("kernel", sorted(path.stem for path in (ROOT / "cuda" / "chunked").glob("*.cu")))
def test_plans_cost_what_the_program_says_that_fits_the_costs(emulator, kernel, monkeypatch):
    table = (ROOT / "cuda" / "chunked" / f"{kernel}.cu").read_text().partition(" kCosts")[2].partition(";")[0]
    costs = [[float(x) for x in numbers.split(", ")] for numbers in re.findall(r"\{([\d., ]+)\}", table)]
    groups = {key: plans for key, plans in cuda_costs.read(cuda_costs.PLANS).items() if key[0] == kernel}
    assert len(costs) == len(groups)
    for (_, gate, dtype), plans in groups.items():
        place = (2 if len(costs) == 4 and not gate else 0) + (dtype == "float32")
        for plan in plans[::5]:
            row = plan._asdict() | {"pass": "backward" if plan.backward else "forward"}
            words = (f"{name}={row[name]}" for name in ("chunk", "columns", "stages", "threads", "segments"))
            monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", " ".join(words))
            asked, gates = sizes_and_gates(row)
            found = emulator.plan(*asked, **gates)
            assert (found.blocks, found.at_once) == (plan.blocks, plan.at_once)
            assert found.cycles == pytest.approx(cuda_costs.cycles(costs[place], plan))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_chunked_where_that_can_be_and_pays(emulator, operation):
    for why, sizes, dtype, capability, wanted in CHOICES:
        assert emulator.choose(operation, sizes, dtype, capability) == wanted, why


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("choice", ["chunked", "recurrent"])
def test_a_benchmark_can_ask_for_either(emulator, operation, choice, monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_CUDA_ALGORITHM", choice)
    for time in (17, 16384):
        assert emulator.choose(operation, (8, time, 8, 64, 64, 64), BF16, 90) == choice


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("capability", [70, 80, 86, 90])
def test_what_is_chosen_is_supported(emulator, operation, capability):
    for size, dtype, by_dimension in product((1, 16, 64, 512), DTYPES, (False, True)):
        asked = (operation, (2, 2048, 4, size, size, 64), dtype, capability, by_dimension)
        assert emulator.choose(*asked) == "recurrent" or emulator.supports(*asked), asked


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_says_what_it_takes(emulator, operation, decays, monkeypatch):
    def supports(dtype, capability, keys=64, interval=64):
        return emulator.supports(operation, (1, 100, 2, keys, 64, interval), dtype, capability, decays)

    assert supports(BF16, 80)
    assert not supports(BF16, 75), "no tf32 before compute capability 8.0"
    assert not supports(torch.float64, 90)
    assert not supports(torch.float32, 90, interval=24), "chunks do not end at 24"
    if decays:  # where chunks follow one another
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "walk=-1")
        assert not any(supports(BF16, 90, keys) for keys in (513, 1000)), "more keys than threads hold"
        assert not supports(torch.float32, 90, 512), "does not fit"
