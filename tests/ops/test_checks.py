"""What the operations refuse, and how they say it: which argument, what it was, what it may be."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.ops import checks, native
from tests.ops.rules import BACKENDS, DEVICE, PRINCIPAL, RULE, RULES, Inputs, Rule, label, relative_error

# Each size another number, so that no wrong shape passes for the right one.
SIZES = {"B": 2, "T": 7, "H": 3, "K": 5, "V": 6}
BUILT = ("reference", *BACKENDS)


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
RULES_AND_NAMES = [(rule, name) for rule in PRINCIPAL for name in inputs_of(rule)]


def refusal(rule: Rule, inputs: Inputs) -> str:
    """What the error says; nothing if there is none."""
    try:
        rule.run(inputs, "auto")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("rule", "name"), RULES_AND_NAMES, ids=label)
def test_wrong_shapes_types_and_devices(rule, name):
    # q, k and v are held against one another: where two disagree, either may be the one named.
    named = "[qkv]" if name in ("q", "k", "v") else name
    for what, change, was in CHANGES[name]:
        inputs = inputs_of(rule)
        said = refusal(rule, inputs | {name: change(inputs[name])})
        assert re.search(rf"\b{named}\b.*\bmust\b", said) and re.search(was, said), f"{what}: {said!r}"


@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_every_backend_is_checked(rule, backend):
    """Shapes, and values where that was asked for."""
    for change in (lambda x: x[:1], filled(torch.nan)):
        inputs = inputs_of(rule)
        inputs["v"] = change(inputs["v"])
        with ops.check_values(True), pytest.raises(ValueError, match=r"\bv\b.*\bmust\b"):
            rule.run(inputs, backend)


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_states_of_the_wrong_type(rule):
    """States are float64 for float64 inputs and float32 for all others, coming in as going out."""
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    for dtype, wrong in ((double, single), (half, half), (torch.float16, torch.float16), (half, double)):
        inputs = inputs_of(rule, dtype=dtype)
        said = refusal(rule, inputs | {"initial_state": inputs["initial_state"].to(wrong)})
        assert re.search(rf"\binitial_state\b.*{wrong}.*\bmust\b", said)


def test_no_heads_and_no_dimensions_are_refused():
    inputs = inputs_of(RULE["sum"], initial_state=False)
    for names, dim in (("qkv", 2), ("qk", 3), ("v", 3)):
        none = {name: inputs[name].narrow(dim, 0, 0) for name in names}
        assert "heads, key_dim and value_dim must be at least 1" in refusal(RULE["sum"], inputs | none), (names, dim)


# Also where there is nothing to compute: a wrong name is wrong on an empty batch too.
SOME_OR_NONE = [{}, {"B": 0}, {"T": 0}, {"T": 1}]


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_backends_that_are_not_there(rule, monkeypatch):
    """A name that none has, or kernels that were not built: and nothing else runs in its place."""
    monkeypatch.setitem(ops.libraries._outcomes, DEVICE.type, "the kernels were lost; build them with care")
    assert issubclass(ops.BackendUnavailable, RuntimeError)
    lost = "'native' was asked for: the kernels were lost; build them with"
    for sizes in SOME_OR_NONE:
        inputs = rule.inputs(**SIZES | sizes)
        for backend in ("fast", "", "Chunkwise", None, 3):
            with pytest.raises(ValueError, match="backend") as raised:
                rule.run(inputs, backend)
            known = ("auto", "reference", "chunkwise", "native", repr(backend))
            assert all(name in str(raised.value) for name in known)
        with pytest.raises(ops.BackendUnavailable, match=lost):
            rule.run(inputs, "native")


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


def test_an_operation_needs_no_more_than_a_reference():
    """Kernels that are built have none for it, and "auto" takes the best that it has."""
    given = ops.OPERATIONS["gated"]
    inputs = RULE["gated"].inputs(**SIZES)
    *values, start = inputs.values()
    for known, wanted in ((given.chunkwise, "chunkwise"), (None, "reference")):
        own = ops.Operation("own", given.gates, given.reference, known)
        assert own.best_backend(DEVICE.type, torch.float32, 7, 5) == wanted
        assert own.best_backend(DEVICE.type, torch.float32, 1, 5) == "reference"
        expected = given(*values, initial_state=start, backend=wanted)
        for actual, same in zip(own(*values, initial_state=start), expected, strict=True):
            assert torch.equal(actual, same)
        with pytest.raises(ops.BackendUnavailable, match=f"own rule has no compiled kernel; or use .*{wanted}"):
            own(*values, backend="native")
    with pytest.raises(ops.BackendUnavailable, match="own rule has no form that is parallel in time"):
        own(*values, backend="chunkwise")
    with pytest.raises(ValueError, match="log_gate has shape"):
        own(*values[:3], values[3][:1])
    with pytest.raises(TypeError, match="own rule was given 3 inputs; it must be q, k, v, log_gate"):
        own(*values[:3])
    with pytest.raises(ValueError, match="rule is 'own'; it must be one of sum, gated, decay, delta"):
        ops.chosen_backend(DEVICE, torch.float32, 7, "own")


def test_there_are_no_kernels_for_other_devices():
    x = torch.zeros(1, 2, 1, 3, device="meta")
    with pytest.raises(ops.BackendUnavailable, match="no compiled kernels for devices of type meta, only for cpu and"):
        ops.sum_rule(x, x, x, backend="native")


# In place


@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize("T", [0, 1, 5])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_in_place_writes_the_final_state_into_the_initial_one(rule, T, backend):
    """A graph that saved the state does not use what it became, in silence; a view of the state is the state."""
    for view in (False, True):
        inputs = rule.inputs(T=T, requires_grad=False)
        expected = rule.run(inputs, backend)
        given = inputs["initial_state"]
        loss = (given * torch.ones_like(given).requires_grad_()).sum()
        state = given[:, :] if view else given
        with torch.no_grad():
            out, final_state = rule.run(inputs | {"initial_state": state}, backend, in_place=True)
        assert final_state is state
        assert relative_error(out, expected[0]) <= 1e-6 and relative_error(given, expected[1]) <= 1e-6
        if T > 0:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("wide", [True, False], ids=["rows-apart", "turned"])
@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_state_in_place_may_be_a_view(rule, backend, wide):
    """Of some columns of a wider state, whose others stay; or with keys and values the other way round."""
    inputs = rule.inputs(T=1, requires_grad=False)
    expected = rule.run(inputs, backend)
    start = inputs["initial_state"]
    whole = start.new_full((*start.shape[:3], 7), 5.0) if wide else torch.empty_like(start.transpose(2, 3))
    state = whole[..., 2:5] if wide else whole.transpose(2, 3)
    state.copy_(start)
    out, _ = rule.run(inputs | {"initial_state": state}, backend, in_place=True)
    assert relative_error(out, expected[0]) <= 1e-6 and relative_error(state, expected[1]) <= 1e-6
    if wide:
        assert torch.equal(whole[..., [0, 1, 5, 6]], torch.full_like(whole[..., :4], 5.0))


@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_state_of_inference_mode_changes_in_place(rule, T, backend):
    """Such tensors do not count how often they change."""
    with torch.inference_mode():
        inputs = rule.inputs(T=T, requires_grad=False)
        wanted = rule.run(inputs, backend)
        out, state = rule.run(inputs, backend, in_place=True)
        assert state is inputs["initial_state"] and state.is_inference()
        assert torch.equal(out, wanted[0]) and torch.equal(state, wanted[1])


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_in_place_needs_a_state_that_can_be_written(rule):
    inputs = rule.inputs(T=3, requires_grad=False)
    with pytest.raises(ValueError, match="initial_state is None and in_place is True"):
        rule.run(inputs | {"initial_state": None}, "auto", in_place=True)
    for name, x in inputs.items():
        with pytest.raises(ValueError, match=r"in_place is True, but .* requires a gradient"):
            rule.run(inputs | {name: x.clone().requires_grad_()}, "auto", in_place=True)
    with torch.no_grad():
        rule.run(rule.inputs(T=3), "auto", in_place=True)
    shared = inputs["initial_state"][:1].expand(inputs["initial_state"].shape)
    with pytest.raises(ValueError, match=r"initial_state has strides \(0, .*must not share memory"):
        rule.run(inputs | {"initial_state": shared}, "auto", in_place=True)


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


@pytest.mark.parametrize(("rule", "name"), RULES_AND_NAMES, ids=label)
def test_wrong_values_are_refused_on_request(rule, name):
    for what, change in VALUES[name]:
        inputs = inputs_of(rule)
        inputs[name] = change(inputs[name])
        assert not refusal(rule, inputs), "off"
        with ops.check_values(True):
            assert re.search(rf"\b{name}\b.*\bmust\b", refusal(rule, inputs)), what
        assert not refusal(rule, inputs), "off again"


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_right_values_pass_the_checks(rule):
    """The ends of each range belong to it: log gates of 0 and -1e4, write strengths of 0 and 1. So does nothing."""
    with ops.check_values(True):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            rule.run(rule.in_regimes(rule.regimes, **SIZES, dtype=dtype), "auto")
        for sizes in ({"B": 0}, {"T": 0}):
            rule.run(rule.inputs(**SIZES | sizes), "auto")


def refuses_nan() -> bool:
    inputs = inputs_of(RULE["sum"])
    return bool(refusal(RULE["sum"], inputs | {"q": filled(torch.nan)(inputs["q"])}))


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


@pytest.mark.parametrize(("setting", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_switch_as_an_environment_variable(setting, on, monkeypatch):
    """It is read when the module is imported: here, once more."""
    monkeypatch.delenv("FASTWEIGHTS_CHECK_VALUES", raising=False)
    if setting is not None:
        monkeypatch.setenv("FASTWEIGHTS_CHECK_VALUES", setting)
    spec = importlib.util.spec_from_file_location("checks_once_more", checks.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    x = torch.full((1, 1, 1, 1), torch.nan)
    with pytest.raises(ValueError, match="not finite") if on else nullcontext():
        module.check_inputs(x, x, x, None)
