"""Which algorithm the binding runs for which inputs."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.cuda.emulated import DTYPES, OPERATIONS, Emulator
from tests.cuda.test_memory import SHAPES


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("dtype", "capability", "time", "why"),
    [
        (torch.float64, 90, 4096, "no tensor core multiplies float64 here"),
        (torch.bfloat16, 70, 4096, "no bfloat16 before 8.0"),
        (torch.bfloat16, 75, 4096, "no bfloat16 before 8.0"),
        (torch.bfloat16, 90, 9, "too short"),
    ],
)
def test_recurrent_where_chunked_cannot_or_does_not_pay(
    emulator: Emulator, operation: str, dtype: torch.dtype, capability: int, time: int, why: str
) -> None:
    assert emulator.choose(operation, (2, time, 4, 64, 64, 64), dtype, capability) == "recurrent", why


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("capability", [80, 90])
def test_chunked_for_long_sequences(emulator: Emulator, operation: str, capability: int) -> None:
    assert emulator.choose(operation, (1, 16384, 8, 64, 64, 64), torch.bfloat16, capability) == "chunked"


@pytest.mark.parametrize("name", ["lm-small", "lm-medium", "gpt2-16", "gpt2-4"])
def test_chunked_where_steps_would_wait_for_one_another(emulator: Emulator, name: str) -> None:
    """Three to seven warps of small states on a multiprocessor have little to do in a step, and much to wait for."""
    for operation in OPERATIONS:
        assert emulator.choose(operation, (*SHAPES[name], 64), torch.bfloat16) == "chunked", operation


@pytest.mark.parametrize("operation", ["diagonal_forward", "diagonal_backward"])
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "algorithm"),
    [(64, 64, "recurrent"), (16, 128, "recurrent"), (64, 128, "chunked"), (512, 64, "chunked"), (256, 512, "chunked")],
)
def test_decays_by_dimension_are_chunked_for_large_states(
    emulator: Emulator, operation: str, key_dim: int, value_dim: int, algorithm: str
) -> None:
    sizes = (8, 512, 8, key_dim, value_dim, 64)
    assert emulator.choose(operation, sizes, torch.bfloat16, 90, separate_decays=True) == algorithm
    assert emulator.choose(operation, sizes, torch.float64, 90, separate_decays=True) == "recurrent"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("choice", ["chunked", "recurrent"])
def test_a_benchmark_can_ask_for_either(
    emulator: Emulator, operation: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CUDA_ALGORITHM", choice)
    for time in (17, 16384):
        assert emulator.choose(operation, (8, time, 8, 64, 64, 64), torch.bfloat16, 90) == choice


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("capability", [70, 80, 86, 90])
def test_what_is_chosen_is_supported(emulator: Emulator, operation: str, capability: int) -> None:
    for size, dtype, by_dimension in product((1, 16, 64, 512), DTYPES, (False, True)):
        asked = (operation, (2, 2048, 4, size, size, 64), dtype, capability, by_dimension)
        assert emulator.choose(*asked) == "recurrent" or emulator.supports(*asked), asked


@pytest.mark.parametrize(
    ("operation", "decays"),
    [*((operation, False) for operation in OPERATIONS), ("diagonal_forward", True), ("diagonal_backward", True)],
)
def test_says_what_it_takes(emulator: Emulator, operation: str, decays: bool) -> None:
    def supports(dtype: torch.dtype, capability: int, keys: int = 64, interval: int = 64) -> bool:
        return emulator.supports(operation, (1, 100, 2, keys, 64, interval), dtype, capability, decays)

    assert supports(torch.bfloat16, 80)
    assert not supports(torch.bfloat16, 75), "no tf32 before compute capability 8.0"
    assert not supports(torch.float64, 90)
    assert not supports(torch.float32, 90, interval=24), "chunks do not end at 24"
    assert (
        decays
        or operation.startswith("diagonal")
        or not emulator.supports(operation, (1, 100, 2, 64, 64, 64), torch.bfloat16, 90, True)
    ), "decays of keys, or an erase key, with a correction"
    if decays:
        assert not any(supports(torch.bfloat16, 90, keys) for keys in (513, 1000)), "more keys than threads hold"


def test_decays_of_512_keys_in_float32_do_not_fit(emulator: Emulator) -> None:
    for way in ("forward", "backward"):
        assert not emulator.supports(f"diagonal_{way}", (1, 40, 1, 512, 512, 16), torch.float32, separate_decays=True)
