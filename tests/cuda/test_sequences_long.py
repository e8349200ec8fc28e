"""The CUDA kernels for sequences, emulated, at the sizes that they are for; minutes: `make test-emulated` alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.cuda.emulated import TOLERANCE, Emulator, check, expected
from tests.cuda.test_sequences import CHUNKED, DECAYS, HALVES
from tests.ops.rules import PRINCIPAL, RULE, RULES_AND_REGIMES, Rule, assert_close, assert_same, label, relative_error

pytestmark = pytest.mark.emulated

# About multiples of 16, 32 and 64 steps, sizes with and without padding, one and several blocks of value columns,
# intervals of one chunk, of several, and longer than the sequence.
SHAPES = [
    *[(1, 1, 1, 64), (15, 3, 16, 64), (16, 16, 3, 16), (17, 33, 32, 16), (63, 32, 33, 64), (64, 64, 64, 64)],
    *[(65, 16, 128, 32), (130, 64, 32, 64), (130, 32, 64, 128), (66, 128, 1, 64), (33, 16, 144, 32)],
    *[(390, 16, 32, 256)],
]
LARGE = [(80, 256, 64, 16), (40, 512, 512, 16), (40, 257, 130, 32)]
CASES = [*product(CHUNKED, SHAPES, TOLERANCE["chunked"]), *product(CHUNKED, LARGE, HALVES)]


@pytest.mark.parametrize(("rule", "sizes", "dtype"), CASES, ids=label)
def test_chunks_agree_with_the_reference(emulator: Emulator, rule: Rule, sizes: tuple, dtype: torch.dtype) -> None:
    T, K, V, interval = sizes
    if rule in DECAYS and dtype == torch.float32 and K == 512:
        # What 16 steps of 512 keys take in float32 leaves no room for the two states of the way back.
        assert not emulator.supports("diagonal_backward", (1, T, 1, K, V, interval), dtype, separate_decays=True)
        return
    check(emulator, rule, "chunked", interval, B=1, T=T, H=1 if sizes in LARGE else 2, K=K, V=V, dtype=dtype)


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
@pytest.mark.parametrize(
    ("K", "V"),
    [(4, 64), (16, 16), (16, 64), (32, 32), (32, 128), (64, 64), (64, 128), (256, 64), (512, 64), (256, 512)],
)
def test_the_papers_shapes_step_by_step(emulator: Emulator, rule: Rule, K: int, V: int) -> None:
    check(emulator, rule, "recurrent", 32, B=1, T=70, H=1, K=K, V=V)


@pytest.mark.parametrize("dtype", HALVES, ids=label)
@pytest.mark.parametrize(
    ("name", "regime"),
    [
        *(("sum", "ordinary"), ("gated", "near one"), ("gated", "ordinary or erased"), ("delta", "near one")),
        *(("decay", "near one"), ("decay of keys", "ordinary or erased"), ("decay of values", "ordinary")),
    ],
    ids=label,
)
def test_few_heads_are_divided_in_time(emulator: Emulator, name: str, regime: str, dtype: torch.dtype) -> None:
    """One head leaves most of the emulated device's multiprocessors idle: its chunks are worked on in segments."""
    shape = {"B": 1, "T": 540, "H": 1, "K": 12, "V": 10}
    check(emulator, RULE[name], "chunked", 128, **shape, dtype=dtype, extras_dtype=torch.float32, regime=regime)


@pytest.mark.parametrize("dtype", HALVES, ids=label)
@pytest.mark.parametrize(("rule", "regime"), [x for x in RULES_AND_REGIMES if x[0] in CHUNKED], ids=label)
def test_every_regime_in_chunks_of_64(emulator: Emulator, rule: Rule, dtype: torch.dtype, regime: str) -> None:
    shape = {"B": 1, "T": 100, "H": 2, "K": 20, "V": 9}
    check(emulator, rule, "chunked", 64, **shape, dtype=dtype, extras_dtype=torch.float32, regime=regime)


@pytest.mark.parametrize(("rule", "regime"), RULES_AND_REGIMES, ids=label)
def test_thousands_of_steps_step_by_step(emulator: Emulator, rule: Rule, regime: str) -> None:
    inputs = rule.inputs(B=1, T=4096, H=1, K=4, V=4, regime=regime)
    assert_close(emulator.run(inputs, interval=64), expected(rule, inputs), 1e-5)


@pytest.mark.parametrize(
    ("name", "regime"),
    [
        *(("sum", "ordinary"), ("gated", "tiny"), ("gated", "near one"), ("gated", "ordinary or erased")),
        *(("decay", "near one"), ("decay", "ordinary or erased"), ("delta", "one"), ("delta", "repeated keys")),
    ],
    ids=label,
)
@pytest.mark.parametrize("plan", ["", "segments=1"], ids=["divided", "one march"])
def test_thousands_of_steps_by_chunks(
    emulator: Emulator, name: str, regime: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tensor cores cut off a sum is always towards zero; in states it would add up to more than is allowed."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", plan)
    check(emulator, RULE[name], "chunked", 128, B=1, T=4096, H=1, K=16, V=16, regime=regime)


# What is allowed of results, and of states and their gradients.
DRIFTING = {
    ("sum", "ordinary"): (4e-3, 1e-5),
    ("gated", "near one"): (4e-3, 3e-5),
    ("decay", "near one"): (4e-3, 3e-3),
    ("delta", "near one"): (8e-3, 8e-3),
    ("delta", "repeated keys"): (8e-3, 4e-3),
    ("delta", "repeated keys, one"): (8e-3, 8e-3),
}


@pytest.mark.parametrize(("name", "regime"), DRIFTING, ids=label)
def test_bfloat16_does_not_drift_over_thousands_of_steps(
    emulator: Emulator, name: str, regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one march. With repeated keys the state's gradient grows in directions that no key erases, while what is
    read of it along keys stays small."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "segments=1")
    types = {"dtype": torch.bfloat16, "extras_dtype": torch.float32}
    inputs = RULE[name].inputs(B=1, T=4096, H=1, K=16, V=16, **types, regime=regime)
    actual, wanted = emulator.run(inputs, interval=128, algorithm="chunked"), expected(RULE[name], inputs)
    results, states = DRIFTING[name, regime]
    for key, value in wanted.items():
        allowed = states if key.endswith("_state") else results
        assert value is None or relative_error(actual[key], value) <= allowed, key


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *product([(70, 33, 130), (100, 200, 64)], TOLERANCE["chunked"]),
        *(((130, 16, 16), torch.bfloat16), ((520, 8, 8), torch.bfloat16), ((40, 512, 16), torch.bfloat16)),
    ],
    ids=label,
)
@pytest.mark.parametrize("rule", CHUNKED, ids=label)
def test_same_bits_in_any_order_of_threads(emulator: Emulator, rule: Rule, shape: tuple, dtype: torch.dtype) -> None:
    """States of one tile to a warp and of several, copies of them and what takes another's place, of each dtype."""
    T, K, V = shape
    inputs = rule.inputs(B=1, T=T, H=1, K=K, V=V, dtype=dtype)
    first = emulator.run(inputs, interval=64, algorithm="chunked")
    for seed in (1, 7):
        with emulator.schedule(seed):
            assert_same(emulator.run(inputs, interval=64, algorithm="chunked"), first, f"in order {seed}")


@pytest.mark.parametrize("plan", ["", "segments=3"])
@pytest.mark.parametrize("rule", CHUNKED, ids=label)
def test_the_way_through_an_interval_is_the_same_in_any_order_of_threads(
    emulator: Emulator, rule: Rule, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 chunks to an interval: states are put down, taken up again, and marched from, the next chunk on its way."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", f"chunk=16 {plan}")
    inputs = rule.inputs(B=1, T=390, H=1, K=16, V=33, dtype=torch.bfloat16)
    first = emulator.run(inputs, interval=256, algorithm="chunked")
    assert_close(first, expected(rule, inputs), TOLERANCE["chunked"][torch.bfloat16])
    assert emulator.workspaces[f"{'delta' if rule.name == 'delta' else 'diagonal'}_backward"] > 0
    with emulator.schedule(1):
        assert_same(emulator.run(inputs, interval=256, algorithm="chunked"), first, "in another order")
