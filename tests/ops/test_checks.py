"""What the operations refuse, and how they say it: which argument, what it was, what it may be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.ops import native
from tests.ops.rules import BACKENDS, DEVICE, RULE, RULES, RULES_AND_REGIMES, Inputs, Rule, label, relative_error

# Each size another number, so that no wrong shape passes for the right one.
SIZES = {"B": 2, "T": 7, "H": 3, "K": 5, "V": 6}
BUILT = ("reference", *BACKENDS)
PRINCIPAL = [RULE[name] for name in ("sum", "gated", "decay", "delta")]


@pytest.fixture(autouse=True)
def value_checks_off():
    with ops.check_values(False):
        yield


def inputs_of(rule: Rule, **kwargs) -> Inputs:
    return rule.inputs(**SIZES, **kwargs)


Change = Callable[[Tensor], object]


def shorter(dim: int) -> Change:
    return lambda x: x.narrow(dim, 0, x.shape[dim] - 1)


def to(dtype: torch.dtype) -> Change:
    return lambda x: x.to(dtype)


def other_stride(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


# (what is wrong, how to make it so, what the message says it was).
SHAPES: list[tuple[str, Change, str]] = [
    ("no dimensions", lambda x: x.sum(), r"\(\)"),
    ("no batch dimension", lambda x: x[0], r"\(7, 3.*\)"),
    ("one dimension more", lambda x: x[..., None], r"\(2, 7, 3.*, 1\)"),
    ("another batch", shorter(0), r"\(1, 7, 3.*\)"),
    ("another time", shorter(1), r"\(2, 6, 3.*\)"),
    ("another number of heads", shorter(2), r"\(2, 7, 2.*\)"),
    ("time and heads in each other's place", lambda x: x.transpose(1, 2), r"\(2, 3, 7.*\)"),
    ("a batch of one", lambda x: x[:1], r"\(1, 7, 3.*\)"),  # no silent broadcasting
]
LAST: list[tuple[str, Change, str]] = [
    ("another dim", shorter(3), r"\(2, 7, 3, [45]\)"),
    ("a dim of one", lambda x: x[..., :1], r"\(2, 7, 3, 1\)"),
]
KINDS: list[tuple[str, Change, str]] = [
    ("integers", to(torch.int64), "int64"),
    ("booleans", to(torch.bool), "bool"),
    ("complex numbers", to(torch.complex64), "complex64"),
    ("float64 among float32", to(torch.float64), "float64"),
    ("float16 among float32", to(torch.float16), "float16"),
    ("another device", lambda x: x.to("meta"), "meta"),
    ("a NumPy array", lambda x: x.detach().cpu().numpy(), "ndarray"),
    ("a list", lambda x: x.tolist(), "list"),
    ("a number", lambda x: 0.5, "float"),
]
MISSING: list[tuple[str, Change, str]] = [("None", lambda x: None, "None")]
STRIDES: list[tuple[str, Change, str]] = [("strided last dim", other_stride, "stride")]
STATES: list[tuple[str, Change, str]] = [
    ("in the papers' form", lambda x: x.transpose(2, 3), r"\(2, 3, 6, 5\)"),
    ("no batch dimension", lambda x: x[0], r"\(3, 5, 6\)"),
    ("another batch", shorter(0), r"\(1, 3, 5, 6\)"),
    ("another number of heads", shorter(1), r"\(2, 2, 5, 6\)"),
    ("another key dim", shorter(2), r"\(2, 3, 4, 6\)"),
    ("another value dim", shorter(3), r"\(2, 3, 5, 5\)"),
    ("bfloat16", to(torch.bfloat16), "bfloat16"),
]

CHANGES: dict[str, list[tuple[str, Change, str]]] = {
    "q": SHAPES + LAST + KINDS + MISSING + STRIDES,
    "k": SHAPES + LAST + KINDS + MISSING + STRIDES,
    "v": SHAPES + KINDS + MISSING + STRIDES,
    "log_gate": SHAPES + KINDS + MISSING,
    "log_key_decay": SHAPES + LAST + KINDS,
    "log_value_decay": SHAPES + LAST + KINDS,
    "beta": SHAPES + KINDS + MISSING,
    "initial_state": STATES + KINDS,
}
WRONG = [
    pytest.param(rule, name, change, was, id=f"{rule.name}-{name}-{what}".replace(" ", "-"))
    for rule in PRINCIPAL
    for name in inputs_of(rule)
    for what, change, was in CHANGES[name]
]


@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize(("rule", "name", "change", "was"), WRONG)
def test_wrong_shapes_types_and_devices(rule, name, change, was, backend):
    inputs = inputs_of(rule)
    inputs[name] = change(inputs[name])
    # q, k and v are held against one another: where two disagree, either may be the one named.
    named = "[qkv]" if name in ("q", "k", "v") else name
    with pytest.raises(ValueError, match=rf"\b{named}\b.*\bmust\b") as raised:
        rule.run(inputs, backend)
    assert re.search(was, str(raised.value)), raised.value


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float64),
    ],
    ids=label,
)
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_states_of_the_wrong_type(rule, dtype, wrong):
    """States are float64 for float64 inputs and float32 for all others, coming in as going out."""
    inputs = inputs_of(rule, dtype=dtype)
    inputs["initial_state"] = inputs["initial_state"].to(wrong)
    with pytest.raises(ValueError, match=rf"\binitial_state\b.*{wrong}.*\bmust\b"):
        rule.run(inputs, "auto")


# Also where there is nothing to compute: a wrong name is wrong on an empty batch too.
SOME_OR_NONE = [
    pytest.param({}, id="some"),
    pytest.param({"B": 0}, id="no-rows"),
    pytest.param({"T": 0}, id="no-steps"),
    pytest.param({"T": 1}, id="one-step"),
]


@pytest.mark.parametrize("sizes", SOME_OR_NONE)
@pytest.mark.parametrize("backend", ["fast", "", "Chunkwise", None, 3], ids=repr)
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_unknown_backends(rule, backend, sizes):
    with pytest.raises(ValueError, match="backend") as raised:
        rule.run(rule.inputs(**SIZES | sizes), backend)
    assert repr(backend) in str(raised.value)
    assert all(known in str(raised.value) for known in ("auto", "reference", "chunkwise", "native"))


@pytest.mark.parametrize("sizes", SOME_OR_NONE)
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_native_says_why_it_is_unavailable(rule, sizes, monkeypatch):
    """And nothing else runs in its place."""
    monkeypatch.setitem(ops.libraries._outcomes, DEVICE.type, "the kernels were lost; build them with care")
    assert issubclass(ops.BackendUnavailable, RuntimeError)
    with pytest.raises(ops.BackendUnavailable, match="'native' was asked for: the kernels were lost; build them with"):
        rule.run(rule.inputs(**SIZES | sizes), "native")


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("there", [True, False], ids=["built", "not-built"])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_auto_takes_the_kernels_where_they_are(rule, there, T, monkeypatch):
    assert ops.libraries.load(DEVICE.type) is None
    if not there:
        monkeypatch.setitem(ops.libraries._outcomes, DEVICE.type, "not built")
    wanted = "native" if there else "chunkwise" if T > 1 else "reference"
    inputs = rule.inputs(T=T)
    assert ops.chosen_backend(DEVICE, inputs["v"].dtype, T) == wanted
    for actual, expected in zip(rule.run(inputs, "auto"), rule.run(inputs, wanted), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("sizes", [{"K": 17, "V": 16}, {"K": 16, "V": 17}, {"K": 16, "V": 16}], ids=str)
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_auto_takes_the_kernels_but_for_larger_keys_of_the_delta_rule(rule, sizes, T, monkeypatch):
    """On a GPU those of more than 512 numbers, over which no call can be divided."""
    monkeypatch.setitem(native.LARGEST_DIM, DEVICE.type, 16)
    inputs, taken = rule.inputs(T=T, **sizes), rule.name != "delta" or sizes["K"] <= 16
    wanted = "native" if taken else "chunkwise" if T > 1 else "reference"
    assert ops.chosen_backend(DEVICE, inputs["v"].dtype, T, rule.name, sizes["K"]) == wanted
    for actual, expected in zip(rule.run(inputs, "auto"), rule.run(inputs, wanted), strict=True):
        assert torch.equal(actual, expected)
    if not taken:
        allowed = "take the delta rule with key dimensions of up to 16, not 17; or use backend='chunkwise'"
        with pytest.raises(ops.BackendUnavailable, match=allowed):
            rule.run(inputs, "native")


def test_there_are_no_kernels_for_other_devices():
    with pytest.raises(ops.BackendUnavailable, match="no compiled kernels for devices of type meta, only for cpu and"):
        x = torch.zeros(1, 2, 1, 3, device="meta")
        ops.sum_rule(x, x, x, backend="native")


# In place


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("T", [0, 1, 5])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_in_place_writes_the_final_state_into_the_initial_one(rule, T, backend):
    inputs = rule.inputs(T=T, requires_grad=False)
    expected = rule.run(inputs, backend)
    state = inputs["initial_state"]
    out, final_state = getattr(ops, rule.operation)(**inputs, backend=backend, in_place=True)
    assert final_state is state
    assert relative_error(out, expected[0]) <= 1e-6 and relative_error(state, expected[1]) <= 1e-6


@pytest.mark.parametrize("wide", [True, False], ids=["rows-apart", "turned"])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_state_in_place_may_be_a_view(rule, backend, wide):
    """Of some columns of a wider state, whose others stay; or with keys and values the other way round."""
    inputs = rule.inputs(T=1, requires_grad=False)
    expected = rule.run(inputs, backend)
    start = inputs["initial_state"]
    whole = start.new_full((*start.shape[:3], 7), 5.0) if wide else torch.empty_like(start.transpose(2, 3))
    state = whole[..., 2:5] if wide else whole.transpose(2, 3)
    state.copy_(start)
    out, _ = getattr(ops, rule.operation)(**inputs | {"initial_state": state}, backend=backend, in_place=True)
    assert relative_error(out, expected[0]) <= 1e-6 and relative_error(state, expected[1]) <= 1e-6
    if wide:
        assert torch.equal(whole[..., [0, 1, 5, 6]], torch.full_like(whole[..., :4], 5.0))


@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_a_graph_that_saved_the_state_does_not_use_what_it_became(rule, T, backend):
    """Its gradient would be wrong in silence. A view of the state is the state."""
    for view in (False, True):
        inputs = rule.inputs(T=T, requires_grad=False)
        state = inputs["initial_state"]
        loss = (state * torch.ones_like(state).requires_grad_()).sum()
        with torch.no_grad():
            changed = state[:, :] if view else state
            getattr(ops, rule.operation)(**inputs | {"initial_state": changed}, backend=backend, in_place=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_state_of_inference_mode_changes_in_place(rule, T, backend):
    """Such tensors do not count how often they change."""
    with torch.inference_mode():
        inputs = rule.inputs(T=T, requires_grad=False)
        wanted = rule.run(inputs, backend)
        out, state = getattr(ops, rule.operation)(**inputs, backend=backend, in_place=True)
        assert state is inputs["initial_state"] and state.is_inference()
        assert torch.equal(out, wanted[0]) and torch.equal(state, wanted[1])


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_in_place_needs_a_state_that_can_be_written(rule):
    inputs = rule.inputs(T=3, requires_grad=False)
    run = getattr(ops, rule.operation)
    with pytest.raises(ValueError, match="initial_state is None and in_place is True"):
        run(**inputs | {"initial_state": None}, in_place=True)
    for name, x in inputs.items():
        if x is not None:
            with pytest.raises(ValueError, match="in_place is True, but .* requires a gradient"):
                run(**inputs | {name: x.clone().requires_grad_()}, in_place=True)
    with torch.no_grad():
        run(**rule.inputs(T=3), in_place=True)
    shared = inputs["initial_state"][:1].expand(inputs["initial_state"].shape)
    with pytest.raises(ValueError, match=r"initial_state has strides \(0, .*must not share memory"):
        run(**inputs | {"initial_state": shared}, in_place=True)


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_options_go_by_name(rule):
    """A state in the place of another argument would be a silent mistake."""
    inputs = inputs_of(rule)
    with pytest.raises(TypeError):
        getattr(ops, rule.operation)(*inputs.values())
    with pytest.raises(TypeError, match="inital_state"):
        getattr(ops, rule.operation)(**inputs, inital_state=None)


# Values: looked at only where the switch is on, as the look makes a GPU wait for the CPU.


def filled(value: float) -> Change:
    def fill(x: Tensor) -> Tensor:
        x = x.detach().clone()
        x.view(-1)[x.numel() // 2] = value
        return x

    return fill


NOT_FINITE = [(str(value), filled(value)) for value in (torch.nan, torch.inf, -torch.inf)]
ABOVE_ZERO = [("1e-3", filled(1e-3)), ("5", filled(5.0))]
OUTSIDE = [("1.001", filled(1.001)), ("-1e-3", filled(-1e-3))]
VALUES: dict[str, list[tuple[str, Change]]] = {
    "q": NOT_FINITE,
    "k": NOT_FINITE,
    "v": NOT_FINITE,
    "log_gate": NOT_FINITE + ABOVE_ZERO,
    "log_key_decay": NOT_FINITE + ABOVE_ZERO,
    "log_value_decay": NOT_FINITE + ABOVE_ZERO,
    "beta": NOT_FINITE + OUTSIDE,
    "initial_state": NOT_FINITE,
}
WRONG_VALUES = [
    pytest.param(rule, name, change, id=f"{rule.name}-{name}-{what}")
    for rule in PRINCIPAL
    for name in inputs_of(rule)
    for what, change in VALUES[name]
]


@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize(("rule", "name", "change"), WRONG_VALUES)
def test_wrong_values_are_refused_on_request(rule, name, change, backend):
    inputs = inputs_of(rule)
    inputs[name] = change(inputs[name])
    rule.run(inputs, backend)  # off: no error
    with ops.check_values(True), pytest.raises(ValueError, match=rf"\b{name}\b.*\bmust\b"):
        rule.run(inputs, backend)
    rule.run(inputs, backend)  # off again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=label)
@pytest.mark.parametrize(("rule", "regime"), RULES_AND_REGIMES, ids=label)
def test_all_regimes_pass_the_value_checks(rule, regime, dtype):
    """The ends of each range belong to it: log gates of 0 and -1e4, write strengths of 0 and 1."""
    with ops.check_values(True):
        rule.run(inputs_of(rule, regime=regime, dtype=dtype), "auto")


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_value_checks_take_empty_batches(rule):
    with ops.check_values(True):
        for sizes in ({"B": 0}, {"T": 0}):
            rule.run(rule.inputs(**SIZES | sizes), "auto")


def refuses_nan() -> bool:
    inputs = inputs_of(RULE["sum"])
    inputs["q"] = filled(torch.nan)(inputs["q"])
    try:
        RULE["sum"].run(inputs, "auto")
    except ValueError:
        return True
    return False


def test_the_switch_as_a_call():
    assert not refuses_nan()
    ops.check_values(True)
    assert refuses_nan()
    ops.check_values(False)
    assert not refuses_nan()


def test_the_switch_as_a_context_gives_back_what_it_found():
    with ops.check_values(True):
        assert refuses_nan()
        with ops.check_values(False):
            assert not refuses_nan()
        assert refuses_nan()
    assert not refuses_nan()
    with pytest.raises(KeyError), ops.check_values(True):
        raise KeyError
    assert not refuses_nan()


@pytest.mark.parametrize(("setting", "expected"), [(None, "off"), ("0", "off"), ("1", "on")])
def test_the_switch_as_an_environment_variable(setting, expected):
    environment = {n: x for n, x in os.environ.items() if n != "FASTWEIGHTS_CHECK_VALUES"}
    if setting is not None:
        environment["FASTWEIGHTS_CHECK_VALUES"] = setting
    program = """
import torch
from fairseq_fastweights import ops
x = torch.full((1, 1, 1, 1), torch.nan)
try:
    ops.sum_rule(x, x, x)
    print("off")
except ValueError:
    print("on")
"""
    root = Path(ops.__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True)
    assert result.stdout.split() == [expected], result.stderr
