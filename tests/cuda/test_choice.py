"""Which algorithm the binding runs for which inputs."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.cuda.emulated import DTYPES, OPERATIONS
from tests.cuda.test_memory import SHAPES

BF16, SIZES = torch.bfloat16, (2, 4096, 4, 64, 64, 64)
# Why, sizes, dtype, compute capability, and what is taken.
CHOICES = [
    ("no tensor core multiplies float64 here", SIZES, torch.float64, 90, "recurrent"),
    *[("no bfloat16 before 8.0", SIZES, BF16, capability, "recurrent") for capability in (70, 75)],
    ("too short", (2, 9, 4, 64, 64, 64), BF16, 90, "recurrent"),
    *[("long", (1, 16384, 8, 64, 64, 64), BF16, capability, "chunked") for capability in (80, 90)],
    # Three to seven warps of small states on a multiprocessor have little to do in a step, and much to wait for.
    *[(name, (*SHAPES[name], 64), BF16, 90, "chunked") for name in ("lm-small", "lm-medium", "gpt2-16", "gpt2-4")],
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_chunked_where_that_can_be_and_pays(emulator, operation):
    for why, sizes, dtype, capability, wanted in CHOICES:
        assert emulator.choose(operation, sizes, dtype, capability) == wanted, why


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "algorithm"),
    [(64, 64, "recurrent"), (16, 128, "recurrent"), (64, 128, "chunked"), (256, 512, "chunked")],
)
def test_decays_by_dimension_are_chunked_for_large_states(emulator, operation, key_dim, value_dim, algorithm):
    sizes = (8, 512, 8, key_dim, value_dim, 64)
    assert emulator.choose(operation, sizes, BF16, 90, separate_decays=True) == algorithm
    assert emulator.choose(operation, sizes, torch.float64, 90, separate_decays=True) == "recurrent"


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
def test_says_what_it_takes(emulator, operation, decays):
    def supports(dtype, capability, keys=64, interval=64):
        return emulator.supports(operation, (1, 100, 2, keys, 64, interval), dtype, capability, decays)

    assert supports(BF16, 80)
    assert not supports(BF16, 75), "no tf32 before compute capability 8.0"
    assert not supports(torch.float64, 90)
    assert not supports(torch.float32, 90, interval=24), "chunks do not end at 24"
    if decays:
        assert not any(supports(BF16, 90, keys) for keys in (513, 1000)), "more keys than threads hold"
        assert not supports(torch.float32, 90, 512), "does not fit"
