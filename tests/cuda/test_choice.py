"""Which algorithm the binding runs for which inputs."""

from __future__ import annotations

import csv
import sys
from itertools import product

import pytest
import torch

from tests.conftest import ROOT
from tests.cuda.emulated import DTYPES, OPERATIONS

sys.path.append(str(ROOT / "benchmarks"))  # as when its programs are started
from harness.cases import SHAPES

BF16, SIZES = torch.bfloat16, (2, 4096, 4, 64, 64, 64)
# Reason, sizes, dtype, compute capability, and the kernel that is chosen.
CHOICES = [
    ("no tensor core multiplies float64 here", SIZES, torch.float64, 90, "recurrent"),
    *[("no bfloat16 before 8.0", SIZES, BF16, capability, "recurrent") for capability in (70, 75)],
    ("too short", (2, 9, 4, 64, 64, 64), BF16, 90, "recurrent"),
    *[("long", (1, 16384, 8, 64, 64, 64), BF16, capability, "chunked") for capability in (80, 90)],
]


def test_the_choice_was_the_faster_on_an_h200_or_a_third_slower(emulator):
    """For the calls whose steps and chunks were both measured, the latter with one plan."""
    calls: dict[tuple, dict[str, float]] = {}
    with (ROOT / "benchmarks" / "results" / "nvidia-h200-plans.csv").open() as file:
        for row in csv.DictReader(file):
            call = tuple(row[name] for name in ("dtype", "shape", "rule", "pass", "interval"))
            calls[call] = {"chunked": float(row["ms"]), "recurrent": float(row["recurrent ms"])}
    lost = []
    for (dtype, name, rule, kind, interval), times in calls.items():
        shape = SHAPES[name]
        operation = f"{'delta' if 'delta' in rule else 'diagonal'}_{kind}"
        sizes = (shape.batch, shape.time, shape.heads, shape.key_dim, shape.value_dim, int(interval))
        gates = {"gated": "gated" in rule, "separate_decays": {"decay": 2, "kimi_delta": 1}.get(rule, 0)}
        lost.append(times[emulator.choose(operation, sizes, getattr(torch, dtype), **gates)] / min(times.values()))
        assert lost[-1] < 1.34, (dtype, name, rule, kind)
    assert len(lost) == 152 and sum(lost) / len(lost) < 1.01


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
def test_the_chosen_kernel_supports_the_call(emulator, operation, capability):
    for size, dtype, by_dimension in product((1, 16, 64, 512), DTYPES, (False, True)):
        asked = (operation, (2, 2048, 4, size, size, 64), dtype, capability, by_dimension)
        assert emulator.choose(*asked) == "recurrent" or emulator.supports(*asked), asked


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_supported_sizes_and_types(emulator, operation, decays):
    def supports(dtype, capability, keys=64, interval=64):
        return emulator.supports(operation, (1, 100, 2, keys, 64, interval), dtype, capability, decays)

    assert supports(BF16, 80)
    assert not supports(BF16, 75), "no tf32 before compute capability 8.0"
    assert not supports(torch.float64, 90)
    assert not supports(torch.float32, 90, interval=24), "chunks do not end at 24"
    # With a correction, as many keys as shared memory has room for; without, there is room for all.
    forward, backward, f32 = "delta_forward", "delta_backward", torch.float32
    most = {(forward, f32, True): 320, (backward, f32, False): 320, (backward, f32, True): 192}
    most[backward, BF16, True] = 384
    for dtype in (f32, BF16):
        keys = most.get((operation, dtype, decays), 512)
        assert supports(dtype, 90, keys) and (keys == 512 or not supports(dtype, 90, keys + 16))
