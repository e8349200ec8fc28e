"""The recurrent CUDA kernels, emulated, against the float64 reference: outputs, final states and all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cuda.emulated import EmulationError, Emulator, compare
from tests.ops.rules import (
    RULE,
    RULES,
    RULES_AND_REGIMES,
    Inputs,
    Rule,
    assert_close,
    cotangents,
    definition,
    label,
    state_dtype,
)

TOLERANCE = {
    # What the project promises is 1e-5 up to T = 4096; what a step's rounding leaves of it at the lengths here.
    torch.float32: 2e-6,
    # Half a unit in the last place is 4e-3 and 5e-4; outputs and gradients are rounded once.
    torch.bfloat16: 6e-3,
    torch.float16: 2e-3,
    torch.float64: 1e-13,
}
DTYPES = tuple(TOLERANCE)

# (T, K, V, interval): each tile, one step, fewer steps than an interval, intervals that do not divide T, no interval,
# more columns than one block takes (the last two).
SHAPES = (
    (1, 1, 1, 0),
    (2, 3, 5, 1),
    (17, 16, 16, 4),
    (67, 33, 20, 16),
    (20, 64, 64, 64),
    (40, 4, 70, 7),
    (9, 130, 33, 3),
    (7, 512, 18, 4),
)


def weights_for(inputs: Inputs) -> tuple[Tensor, Tensor]:
    k, v = inputs["k"], inputs["v"]
    assert k is not None and v is not None
    state = torch.empty(k.shape[0], *k.shape[2:], v.shape[3], dtype=state_dtype(v.dtype))
    return cotangents((torch.empty_like(v, memory_format=torch.contiguous_format), state))


def check(emulator: Emulator, rule: Rule, dtype: torch.dtype, interval: int, **shape: object) -> None:
    def close(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
        assert_close(actual, expected, TOLERANCE[dtype])

    compare(emulator, rule, close, interval=interval, dtype=dtype, **shape)


@pytest.mark.parametrize("rule", RULES, ids=label)
@pytest.mark.parametrize(("T", "K", "V", "interval"), SHAPES)
def test_every_shape(emulator: Emulator, rule: Rule, T: int, K: int, V: int, interval: int) -> None:
    check(emulator, rule, torch.float32, interval, B=1, T=T, K=K, V=V)


@pytest.mark.parametrize(("rule", "regime"), RULES_AND_REGIMES, ids=label)
def test_every_regime(emulator: Emulator, rule: Rule, regime: str) -> None:
    check(emulator, rule, torch.float32, 16, B=1, T=67, K=6, V=7, regime=regime)


@pytest.mark.parametrize("rule", RULES, ids=label)
@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize(("K", "V"), [(5, 7), (16, 24)])
def test_every_dtype(emulator: Emulator, rule: Rule, dtype: torch.dtype, K: int, V: int) -> None:
    check(emulator, rule, dtype, 8, T=19, K=K, V=V)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=label)
@pytest.mark.parametrize("rule", [RULE["gated"], RULE["decay"], RULE["delta"]], ids=label)
def test_gates_in_float32(emulator: Emulator, rule: Rule, dtype: torch.dtype) -> None:
    # The gates' own gradients are held to the inputs' tolerance: v and k are rounded to it.
    extras = {"extras_dtype": torch.float32}
    tolerance = 1e-6 if dtype == torch.float64 else TOLERANCE[dtype]
    compare(
        emulator, rule, lambda a, e: assert_close(a, e, tolerance), interval=8, dtype=dtype, T=19, K=9, V=12, **extras
    )


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_without_an_initial_state(emulator: Emulator, rule: Rule) -> None:
    check(emulator, rule, torch.float32, 5, T=12, K=20, V=9, initial_state=False)


@pytest.mark.parametrize("rule", RULES, ids=label)
@pytest.mark.parametrize("use", ["out", "final_state"])
def test_one_output_used(emulator: Emulator, rule: Rule, use: str) -> None:
    inputs = rule.inputs(T=12, K=5, V=9)
    d_out, d_final = weights_for(inputs)
    weights = (d_out, None) if use == "out" else (torch.zeros_like(d_out), d_final)
    actual = emulator.run(rule, inputs, interval=5, weights=weights)
    assert_close(actual, definition(rule, inputs, weights), TOLERANCE[torch.float32])


@pytest.mark.parametrize("interval", [0, 1, 2, 16, 31, 40, 70])
@pytest.mark.parametrize("rule", [RULE["sum"], RULE["gated"], RULE["decay"], RULE["delta"]], ids=label)
def test_every_interval(emulator: Emulator, rule: Rule, interval: int) -> None:
    check(emulator, rule, torch.float32, interval, B=1, T=70, H=1, K=5, V=7)


DECAYS = (RULE["decay"], RULE["decay of keys"], RULE["decay of values"])


def check_divided(emulator: Emulator, rule: Rule, dtype: torch.dtype, interval: int, **shape: object) -> None:
    check(emulator, rule, dtype, interval, **shape)
    assert emulator.workspaces["diagonal_forward"] > 0
    assert emulator.workspaces["diagonal_backward"] > 0


@pytest.mark.parametrize(("T", "interval"), [(384, 128), (391, 64), (512, 96), (520, 5)])
@pytest.mark.parametrize("rule", DECAYS, ids=label)
def test_few_heads_are_divided_in_time(emulator: Emulator, rule: Rule, T: int, interval: int) -> None:
    """One head leaves most of the emulated device's multiprocessors idle: its steps are worked on in segments."""
    check_divided(emulator, rule, torch.float32, interval, B=1, T=T, H=1, K=5, V=7)


@pytest.mark.parametrize("regime", RULE["decay"].regimes, ids=label)
@pytest.mark.parametrize("rule", DECAYS, ids=label)
def test_segments_of_every_regime(emulator: Emulator, rule: Rule, regime: str) -> None:
    check_divided(emulator, rule, torch.float32, 64, B=1, T=400, H=2, K=3, V=4, regime=regime)


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_segments_of_every_dtype(emulator: Emulator, dtype: torch.dtype) -> None:
    extras = torch.float64 if dtype == torch.float64 else torch.float32
    check_divided(emulator, RULE["decay"], dtype, 64, B=2, T=390, H=1, K=5, V=6, extras_dtype=extras)


@pytest.mark.parametrize("rule", DECAYS, ids=label)
def test_segments_of_states_that_several_blocks_share(emulator: Emulator, rule: Rule) -> None:
    check_divided(emulator, rule, torch.float32, 128, B=1, T=400, H=1, K=36, V=40, initial_state=False)


@pytest.mark.parametrize(
    ("T", "H", "interval"),
    [(380, 1, 64), (400, 1, 0), pytest.param(384, 355, 64, marks=pytest.mark.emulated)],
    ids=["too short", "no state to start the way back from", "enough heads"],
)
def test_nothing_is_divided_without_need(emulator: Emulator, T: int, H: int, interval: int) -> None:
    check(emulator, RULE["decay"], torch.float32, interval, B=1, T=T, H=H, K=2, V=2)
    assert emulator.workspaces["diagonal_backward"] == 0
    assert emulator.workspaces["diagonal_forward"] == 0 or interval == 0


@pytest.mark.parametrize("rule", [RULE["gated"], RULE["delta"], RULE["sum"]], ids=label)
def test_kept_states_are_those_before_their_steps(emulator: Emulator, rule: Rule) -> None:
    T, interval = 23, 5
    inputs = rule.inputs(T=T, K=6, V=10, requires_grad=False)
    q, k, v, state = (inputs[name] for name in ("q", "k", "v", "initial_state"))
    assert q is not None and k is not None and v is not None
    if rule.name == "delta":
        states = emulator.delta_forward(q, k, v, inputs["beta"], state, interval)[2]  # type: ignore[arg-type]
    else:
        gate = inputs.get("log_gate")
        states = emulator.diagonal_forward(q, k, v, gate, gate is not None, None, None, state, interval)[2]
    expected = []
    for end in range(interval, T, interval):
        part = {n: x if x is None or n == "initial_state" else x[:, :end] for n, x in inputs.items()}
        expected.append(definition(rule, part, None)["final_state"])
    assert_close({"states": states}, {"states": torch.stack(expected, dim=2)}, TOLERANCE[torch.float32])  # type: ignore[arg-type]


def test_a_gate_that_does_not_scale_what_is_written(emulator: Emulator) -> None:
    """Retention: log_gate with complement False is the same log decay for every key dimension."""
    inputs = RULE["gated"].inputs(T=30, K=5, V=6)
    weights = weights_for(inputs)
    actual = emulator.run(RULE["gated"], inputs, interval=8, weights=weights, complement=False)
    spread = {n: x for n, x in inputs.items() if n != "log_gate"}
    gate = inputs["log_gate"]
    assert gate is not None
    spread["log_key_decay"] = gate.detach()[..., None].expand(-1, -1, -1, 5).clone().requires_grad_()
    spread["log_value_decay"] = None
    expected = definition(RULE["decay"], spread, weights)
    d_decay = expected.pop("gradient of log_key_decay")
    assert d_decay is not None
    expected["gradient of log_gate"] = d_decay.sum(-1)
    assert_close(actual, expected, TOLERANCE[torch.float32])


def strided(x: Tensor | None, how: str) -> Tensor | None:
    """The values of a (batch, time, heads[, dim]) tensor within a larger one that is NaN elsewhere."""
    if x is None:
        return None
    if how == "time first":  # as fairseq has it: (time, batch, heads * dim)
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    rest = x.shape[3:]
    # "padded": whole vectors fit before and behind; "odd": every row starts at another alignment.
    before, more = (8, 8) if how == "padded" else (1, 2)
    B, T, H = x.shape[:3]
    shape = (B, T + 2, H, rest[0] + before + more) if rest else (B, T + 2, H + 1)
    wide = torch.full(shape, torch.nan, dtype=x.dtype)
    view = wide[:, :T, :, before : before + rest[0]] if rest else wide[:, :T, :H]
    view.copy_(x)
    return view


@pytest.mark.parametrize("how", ["time first", "padded", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("rule", [RULE["gated"], RULE["decay"], RULE["delta"]], ids=label)
def test_strides_do_not_change_a_bit(emulator: Emulator, rule: Rule, dtype: torch.dtype, how: str) -> None:
    inputs = rule.inputs(T=19, K=8, V=16, dtype=dtype, requires_grad=False)
    d_out, d_final = weights_for(inputs)
    expected = emulator.run(rule, inputs, interval=8, weights=(d_out, d_final))
    views = {n: x if n == "initial_state" else strided(x, how) for n, x in inputs.items()}
    actual = emulator.run(rule, views, interval=8, weights=(strided(d_out, how), d_final))
    for name, tensor in expected.items():
        assert tensor is not None and torch.equal(actual[name], tensor), name  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [RULE["sum"], RULE["gated"], RULE["decay"], RULE["delta"]], ids=label)
@pytest.mark.parametrize(("T", "K", "V"), [(21, 20, 40), (21, 100, 36), (390, 3, 5)])
def test_threads_may_run_in_any_order(emulator: Emulator, rule: Rule, T: int, K: int, V: int) -> None:
    inputs = rule.inputs(B=1, T=T, H=1 if T > 300 else 2, K=K, V=V)
    weights = weights_for(inputs)
    expected = emulator.run(rule, inputs, interval=6, weights=weights)
    for seed in (1, 7):
        with emulator.schedule(seed):
            actual = emulator.run(rule, inputs, interval=6, weights=weights)
        for name, tensor in expected.items():
            assert tensor is not None and torch.equal(actual[name], tensor), name  # type: ignore[arg-type]


@pytest.mark.parametrize(("capability", "shared_memory"), [(70, 96), (75, 64), (80, 163), (86, 99)])
@pytest.mark.parametrize("rule", [RULE["gated"], RULE["decay"], RULE["delta"]], ids=label)
def test_devices_with_less_shared_memory(emulator: Emulator, rule: Rule, capability: int, shared_memory: int) -> None:
    with emulator.device(capability, shared_memory * 1024):
        check(emulator, rule, torch.float32, 64, B=1, T=70, H=1, K=64, V=64)


def test_no_batch(emulator: Emulator) -> None:
    for rule in (RULE["sum"], RULE["delta"]):
        actual = emulator.run(rule, rule.inputs(B=0, T=5), interval=2)
        assert all(x is None or x.numel() == 0 for x in actual.values())


@pytest.mark.parametrize("rule", [RULE["sum"], RULE["delta"]], ids=label)
@pytest.mark.parametrize(("K", "V"), [(513, 4), (4, 513)])
def test_dimensions_beyond_the_kernels_are_refused(emulator: Emulator, rule: Rule, K: int, V: int) -> None:
    with pytest.raises(EmulationError, match="returned 1"):
        emulator.run(rule, rule.inputs(B=1, T=2, K=K, V=V), interval=2)


@pytest.mark.emulated
@pytest.mark.parametrize(("rule", "regime"), RULES_AND_REGIMES, ids=label)
def test_long_sequences(emulator: Emulator, rule: Rule, regime: str) -> None:
    def close(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
        assert_close(actual, expected, 1e-5)

    compare(emulator, rule, close, interval=64, B=1, T=4096, H=1, K=4, V=4, regime=regime)


@pytest.mark.emulated
@pytest.mark.parametrize("rule", [RULE["sum"], RULE["gated"], RULE["decay"], RULE["delta"]], ids=label)
@pytest.mark.parametrize(
    ("K", "V"),
    [(4, 64), (16, 16), (16, 64), (32, 32), (32, 128), (64, 64), (64, 128), (256, 64), (512, 64), (256, 512)],
)
def test_the_papers_shapes(emulator: Emulator, rule: Rule, K: int, V: int) -> None:
    check(emulator, rule, torch.float32, 32, B=1, T=70, H=1, K=K, V=V)
