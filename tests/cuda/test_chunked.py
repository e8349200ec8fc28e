"""The chunk-parallel CUDA kernels against the float64 reference, run by the emulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.emulated import OPERATIONS, Emulator, compare
from tests.ops.rules import (
    RULE,
    Inputs,
    Rule,
    assert_close,
    cotangents,
    deal,
    definition,
    differentiate,
    in_float64,
    label,
    relative_error,
    state_dtype,
)

DECAYS = ("decay", "decay of keys", "decay of values")
CHUNKED = ("sum", "gated", "delta", *DECAYS)
# Of design.md. float16 rounds its results to 2^-11, and a step's decay or write strength likewise.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# (time, key_dim, value_dim, interval): about multiples of 16, 32 and 64 steps, sizes with and without padding, one and
# several blocks of value columns, intervals of one chunk, of several, and longer than the sequence.
SHAPES = (
    (1, 1, 1, 64),
    (15, 3, 16, 64),
    (16, 16, 3, 16),
    (17, 33, 32, 16),
    (63, 32, 33, 64),
    (64, 64, 64, 64),
    (65, 16, 128, 32),
    (130, 64, 32, 64),
    (130, 32, 64, 128),
    (66, 128, 1, 64),
    (33, 16, 144, 32),
    (390, 16, 32, 256),
)


def run(
    emulator: Emulator, rule: Rule, inputs: Inputs, interval: int = 64, **options: object
) -> dict[str, Tensor | None]:
    """Outputs and gradients of the chunked kernels, for the gradients of out and final_state that `expected` takes."""
    return emulator.run(rule, inputs, interval=interval, algorithm="chunked", weights=weights_of(inputs), **options)


def weights_of(inputs: Inputs) -> tuple[Tensor, Tensor]:
    v, k = inputs["v"], inputs["k"]
    assert v is not None and k is not None
    state = torch.empty(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=state_dtype(v.dtype))
    return cotangents((v, state))


def expected(rule: Rule, inputs: Inputs) -> dict[str, Tensor | None]:
    return definition(rule, inputs, weights_of(inputs))


def short_and_long(short: Sequence[tuple], every: Iterable[tuple]) -> list[Any]:
    """All cases, those that are not `short` marked: they take the emulator long."""
    return [*short, *(pytest.param(*case, marks=pytest.mark.emulated) for case in every if case not in short)]


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    short_and_long(
        deal(CHUNKED, [(17, 33, 32, 16), (33, 16, 144, 32), (65, 5, 3, 64)], list(TOLERANCE)),
        itertools.product(CHUNKED, SHAPES, TOLERANCE),
    ),
    ids=label,
)
def test_agrees_with_the_reference(emulator: Emulator, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    T, K, V, interval = shape
    check = lambda actual, wanted: assert_close(actual, wanted, TOLERANCE[dtype])  # noqa: E731
    compare(emulator, RULE[name], check, interval=interval, algorithm="chunked", B=1, T=T, H=2, K=K, V=V, dtype=dtype)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("shape", [(80, 256, 64, 16), (40, 512, 512, 16), (40, 257, 130, 32)], ids=str)
@pytest.mark.parametrize("name", CHUNKED)
def test_agrees_in_large_dimensions(emulator: Emulator, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    T, K, V, interval = shape
    inputs = RULE[name].inputs(B=1, T=T, H=1, K=K, V=V, dtype=dtype)
    if name in DECAYS and dtype == torch.float32 and K == 512:
        # What 16 steps of 512 keys take in float32 leaves no room for the two states of the way back.
        assert not emulator.supports("diagonal_backward", (1, T, 1, K, V, interval), dtype, separate_decays=True)
        return
    assert_close(run(emulator, RULE[name], inputs, interval), expected(RULE[name], inputs), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.emulated)], ids=label)
@pytest.mark.parametrize(
    ("name", "regime"), [(name, regime) for name in CHUNKED for regime in RULE[name].regimes], ids=label
)
def test_extreme_gates_and_write_strengths(emulator: Emulator, name: str, regime: str, dtype: torch.dtype) -> None:
    inputs = RULE[name].inputs(B=1, T=70, H=1, K=9, V=5, dtype=dtype, extras_dtype=torch.float32, regime=regime)
    assert_close(run(emulator, RULE[name], inputs), expected(RULE[name], inputs), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
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
    inputs = RULE[name].inputs(B=1, T=540, H=1, K=12, V=10, dtype=dtype, extras_dtype=torch.float32, regime=regime)
    assert_close(run(emulator, RULE[name], inputs, 128), expected(RULE[name], inputs), TOLERANCE[dtype])


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("name", "regime"),
    [
        *(("sum", "ordinary"), ("gated", "tiny"), ("gated", "near one"), ("gated", "ordinary or erased")),
        *(("decay", "near one"), ("decay", "ordinary or erased"), ("delta", "one"), ("delta", "repeated keys")),
    ],
    ids=label,
)
@pytest.mark.parametrize("plan", ["", "segments=1"], ids=["divided", "one march"])
def test_thousands_of_steps(
    emulator: Emulator, name: str, regime: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tensor cores cut off a sum is always towards zero; in states it would add up to more than is allowed."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", plan)
    inputs = RULE[name].inputs(B=1, T=4096, H=1, K=16, V=16, regime=regime)
    assert_close(run(emulator, RULE[name], inputs, 128), expected(RULE[name], inputs), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("name", CHUNKED)
def test_how_many_states_are_kept_changes_no_bit(emulator: Emulator, name: str, dtype: torch.dtype) -> None:
    """Those that are computed again are those that the forward pass had."""
    inputs = RULE[name].inputs(B=1, T=150, H=1, K=9, V=10, dtype=dtype)
    wanted = run(emulator, RULE[name], inputs, 64)
    for interval in (128, 512):
        for key, value in run(emulator, RULE[name], inputs, interval).items():
            assert value is None or torch.equal(value, wanted[key]), (interval, key)


# What is allowed of results, and of states and their gradients.
DRIFTING = {
    ("sum", "ordinary"): (4e-3, 1e-5),
    ("gated", "near one"): (4e-3, 3e-5),
    ("decay", "near one"): (4e-3, 3e-3),
    ("delta", "near one"): (8e-3, 8e-3),
    ("delta", "repeated keys"): (8e-3, 4e-3),
    ("delta", "repeated keys, one"): (8e-3, 8e-3),
}


@pytest.mark.emulated
@pytest.mark.parametrize(("name", "regime"), DRIFTING, ids=label)
def test_bfloat16_does_not_drift_over_thousands_of_steps(
    emulator: Emulator, name: str, regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one march. With repeated keys the state's gradient grows in directions that no key erases, while what is
    read of it along keys stays small."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "segments=1")
    inputs = RULE[name].inputs(
        B=1, T=4096, H=1, K=16, V=16, dtype=torch.bfloat16, extras_dtype=torch.float32, regime=regime
    )
    actual, wanted = run(emulator, RULE[name], inputs, 128), expected(RULE[name], inputs)
    results, states = DRIFTING[name, regime]
    for key, value in wanted.items():
        allowed = states if key.endswith("_state") else results
        assert value is None or relative_error(actual[key], value) <= allowed, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("regime", RULE["gated"].regimes, ids=label)
def test_retention_is_a_gate_whose_writes_are_whole(emulator: Emulator, regime: str, dtype: torch.dtype) -> None:
    inputs = RULE["gated"].inputs(B=1, T=70, H=2, K=20, V=9, dtype=dtype, extras_dtype=torch.float32, regime=regime)
    actual = run(emulator, RULE["gated"], inputs, complement=False)
    gate = inputs["log_gate"]
    assert gate is not None
    retention = {**inputs, "log_gate": None, "log_key_decay": gate.detach()[..., None].requires_grad_()}
    arguments = {name: x for name, x in retention.items() if name != "log_gate"} | {"log_value_decay": None}
    wanted = expected(RULE["decay"], arguments)
    wanted["gradient of log_gate"] = wanted.pop("gradient of log_key_decay").squeeze(-1)  # type: ignore[union-attr]
    assert_close(actual, {name: wanted[name] for name in actual}, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "name"),
    short_and_long(
        [((40, 32, 40), name) for name in CHUNKED],
        itertools.product([(40, 64, 64), (40, 128, 96), (64, 256, 128), (40, 512, 512)], CHUNKED),
    ),
    ids=label,
)
def test_bfloat16_costs_its_own_rounding_and_states_hardly_any(
    emulator: Emulator, name: str, shape: tuple[int, ...]
) -> None:
    """Results are rounded, which makes an error of 0.0017, and so is what products read of states and scores. States
    are read so, but kept in float32: those of the delta rule, whose writes depend on what is read, get some of it, and
    so do those of decays by dimension, which scale what is written."""
    T, K, V = shape
    inputs = RULE[name].inputs(B=1, T=T, H=1, K=K, V=V, dtype=torch.bfloat16)
    actual, wanted = run(emulator, RULE[name], inputs), expected(RULE[name], inputs)
    operation = f"{'delta' if name == 'delta' else 'diagonal'}_backward"
    plan = emulator.plan(
        operation, (1, T, 1, K, V, 64), torch.bfloat16, gated=name == "gated", separate_decays=name in DECAYS
    )
    of_states = {"delta": 2e-3, **dict.fromkeys(DECAYS, 3e-3)}.get(name, 4e-6)
    for key, value in wanted.items():
        allowed = of_states if key.endswith("_state") else 0.004 + 0.0003 * (plan.blocks - 1)
        assert value is None or relative_error(actual[key], value) <= allowed, key


@pytest.mark.parametrize(("T", "plan"), [(37, ""), (130, "chunk=16")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("name", CHUNKED)
def test_strided_inputs(
    emulator: Emulator, name: str, dtype: torch.dtype, T: int, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of fairseq's (time, batch, channel) tensors, one of them at an odd address."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", plan)
    inputs = RULE[name].inputs(B=2, T=T, H=2, K=24, V=16, dtype=dtype, requires_grad=True)
    strided: Inputs = {}
    for position, (key, x) in enumerate(inputs.items()):
        if x is None or key == "initial_state":
            strided[key] = x
            continue
        wide = torch.full((x.shape[1], x.shape[0], *x.shape[2:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
        view = wide.transpose(0, 1)[..., position % 2 : position % 2 + x.shape[-1]]
        view.copy_(x.detach())
        strided[key] = view.requires_grad_()
    actual = run(emulator, RULE[name], strided, 128)
    assert_close(actual, expected(RULE[name], inputs), TOLERANCE[dtype])


ORDERS = [
    *(((70, 33, 130), dtype) for dtype in TOLERANCE),
    *(((100, 200, 64), dtype) for dtype in TOLERANCE),
    *(((130, 16, 16), torch.bfloat16), ((520, 8, 8), torch.bfloat16), ((40, 512, 16), torch.bfloat16)),
]


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    short_and_long(
        deal(CHUNKED, [(35, 33, 50)], [torch.float32, torch.bfloat16]),
        [(name, *case) for name in CHUNKED for case in ORDERS],
    ),
    ids=label,
)
def test_same_bits_in_any_order_of_threads(
    emulator: Emulator, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """States of one tile to a warp and of several, copies of them and what takes another's place, of each dtype."""
    T, K, V = shape
    inputs = RULE[name].inputs(B=1, T=T, H=1, K=K, V=V, dtype=dtype)
    first = run(emulator, RULE[name], inputs)
    for seed in (1, 7):
        with emulator.schedule(seed):
            again = run(emulator, RULE[name], inputs)
        for key, value in first.items():
            assert value is not None and torch.equal(value, again[key]), f"{key} under order {seed}"


@pytest.mark.parametrize("plan", ["", "segments=3"])
@pytest.mark.parametrize("name", CHUNKED)
def test_the_way_through_an_interval_is_the_same_in_any_order_of_threads(
    emulator: Emulator, name: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 chunks to an interval: states are put down, taken up again, and marched from, the next chunk on its way."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", f"chunk=16 {plan}")
    inputs = RULE[name].inputs(B=1, T=390, H=1, K=16, V=33, dtype=torch.bfloat16)
    first = run(emulator, RULE[name], inputs, 256)
    assert_close(first, expected(RULE[name], inputs), TOLERANCE[torch.bfloat16])
    assert emulator.workspaces[f"{'delta' if name == 'delta' else 'diagonal'}_backward"] > 0
    with emulator.schedule(1):
        again = run(emulator, RULE[name], inputs, 256)
    for key, value in first.items():
        assert value is not None and torch.equal(value, again[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("name", CHUNKED)
def test_a_nan_is_passed_on_in_its_column_alone(emulator: Emulator, name: str, dtype: torch.dtype) -> None:
    """The NaN that a GPU makes, whose bits are all ones: to round it as if it were a number would make it 0. (The steps
    before it in its chunk may get it too: it is multiplied by 0 there.)"""
    inputs = RULE[name].inputs(B=1, T=70, H=1, K=16, V=16, dtype=dtype, initial_state=False)
    v = inputs["v"].detach().clone()  # type: ignore[union-attr]
    bits, integers = (0x7FFF, torch.int16) if dtype == torch.bfloat16 else (0x7FFFFFFF, torch.int32)
    v.view(integers)[0, 20, 0, 5] = bits
    out = run(emulator, RULE[name], {**inputs, "v": v})["out"]
    assert out is not None
    found = torch.isnan(out[0, :, 0])
    assert bool(found[20:, 5].all()) and not bool(found[:, :5].any()) and not bool(found[:, 6:].any())


@pytest.mark.parametrize("use", ["out", "state"])
@pytest.mark.parametrize("name", CHUNKED)
def test_without_initial_state_and_with_either_gradient_alone(emulator: Emulator, name: str, use: str) -> None:
    inputs = RULE[name].inputs(B=1, T=70, H=2, K=16, V=8, initial_state=False)
    d_out, d_final = weights_of(inputs)
    weights = (d_out, None) if use == "out" else (None, d_final)
    actual = emulator.run(RULE[name], inputs, interval=64, algorithm="chunked", weights=weights)
    leaves = in_float64(inputs)
    outputs = RULE[name].reference(leaves)
    grads = differentiate(outputs, leaves, tuple(None if w is None else w.double() for w in weights))
    for key, grad in grads.items():
        wanted = torch.zeros_like(inputs[key]) if grad is None else grad  # type: ignore[arg-type]
        assert relative_error(actual[f"gradient of {key}"], wanted) <= 1e-5, key


@pytest.mark.parametrize("name", CHUNKED)
def test_states_are_kept_at_every_interval(emulator: Emulator, name: str) -> None:
    rule, interval = RULE[name], 32
    inputs = rule.inputs(B=1, T=97, H=2, K=16, V=8, requires_grad=False)
    q, k, v, state = (inputs[key] for key in ("q", "k", "v", "initial_state"))
    if name == "delta":
        *_, states = emulator.delta_forward(q, k, v, inputs["beta"], state, interval, "chunked")
    else:
        gate, *decays = (inputs.get(key) for key in ("log_gate", "log_key_decay", "log_value_decay"))
        *_, states = emulator.diagonal_forward(q, k, v, gate, gate is not None, *decays, state, interval, "chunked")
    assert states.shape[2] == 3
    for n in range(1, 4):
        prefix = {key: x if x is None or key == "initial_state" else x[:, : n * interval] for key, x in inputs.items()}
        assert relative_error(states[:, :, n - 1], definition(rule, prefix, None)["final_state"]) <= 1e-5, n


@pytest.mark.emulated
@pytest.mark.parametrize(("capability", "kilobytes"), [(80, 163), (86, 99)])
@pytest.mark.parametrize("name", CHUNKED)
def test_devices_with_less_shared_memory(emulator: Emulator, name: str, capability: int, kilobytes: int) -> None:
    inputs = RULE[name].inputs(B=1, T=40, H=1, K=128, V=128)
    family = "delta" if name == "delta" else "diagonal"
    with emulator.device(capability, kilobytes * 1024):
        for way in ("forward", "backward"):
            sizes, decays = (1, 40, 1, 128, 128, 32), name in DECAYS
            assert emulator.supports(f"{family}_{way}", sizes, torch.float32, capability, decays)
        actual = run(emulator, RULE[name], inputs, 32)
    assert_close(actual, expected(RULE[name], inputs), 1e-5)


@pytest.mark.parametrize(
    ("operation", "decays"),
    [*((operation, False) for operation in OPERATIONS), ("diagonal_forward", True), ("diagonal_backward", True)],
)
def test_says_what_it_takes(emulator: Emulator, operation: str, decays: bool) -> None:
    sizes = (1, 100, 2, 64, 64, 64)
    supports = partial(emulator.supports, operation, separate_decays=decays)
    assert supports(sizes, torch.bfloat16, 80)
    assert not supports(sizes, torch.bfloat16, 75), "no tf32 before compute capability 8.0"
    assert not supports(sizes, torch.float64, 90)
    assert not supports((1, 100, 2, 64, 64, 24), torch.float32, 90), "chunks do not end at 24"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=label)
def test_decays_of_512_keys_fit_in_16_bits(emulator: Emulator, dtype: torch.dtype) -> None:
    inputs = RULE["decay"].inputs(B=1, T=40, H=1, K=512, V=24, dtype=dtype)
    assert_close(run(emulator, RULE["decay"], inputs, 16), expected(RULE["decay"], inputs), TOLERANCE[dtype])


@pytest.mark.parametrize("key_dim", [513, 1000])
def test_decays_of_more_keys_than_threads_hold_are_refused(emulator: Emulator, key_dim: int) -> None:
    for way in ("forward", "backward"):
        sizes = (1, 100, 1, key_dim, 16, 64)
        assert not emulator.supports(f"diagonal_{way}", sizes, torch.bfloat16, separate_decays=True)
