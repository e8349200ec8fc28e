"""Refusals of the operations: each names the argument, its value and the allowed ones."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.ops import backends, checks, kernels
from tests.ops.agreement import assert_close, assert_same
from tests.ops.results import named
from tests.ops.rules import BACKENDS, DEVICE, PRINCIPAL, RULE, RULES, Inputs, RuleCase

# Each size another number, so that no wrong shape passes for the right one.
SIZES = {"B": 2, "T": 7, "H": 3, "K": 5, "V": 6}
BUILT = ("reference", *BACKENDS)


@pytest.fixture(autouse=True)
def value_checks_off():
    with ops.check_values(False):
        yield


def inputs_of(name: str, **kwargs) -> Inputs:
    return RULE[name].inputs(**SIZES | kwargs)


def shorter(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.narrow(dim, 0, x.shape[dim] - 1)


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


# A change that makes an input wrong, and its description in the message.
SHAPES = [
    (lambda x: x.sum(), r"\(\)"),
    (lambda x: x[0], r"\(7, 3.*\)"),
    (lambda x: x[..., None], r"\(2, 7, 3.*, 1\)"),
    (shorter(0), r"\(1, 7, 3.*\)"),  # a batch of one is not broadcast
    (shorter(1), r"\(2, 6, 3.*\)"),
    (shorter(2), r"\(2, 7, 2.*\)"),
    (lambda x: x.transpose(1, 2), r"\(2, 3, 7.*\)"),
]
LAST = [(shorter(3), r"\(2, 7, 3, [45]\)"), (lambda x: x[..., :1], r"\(2, 7, 3, 1\)")]
KINDS = [
    *[(to(dtype), str(dtype)) for dtype in (torch.int64, torch.bool, torch.complex64, torch.float64, torch.float16)],
    (Tensor.to_sparse, r"layout torch\.sparse_coo"),
    *[(lambda x: x.to("meta"), "meta"), (lambda x: x.detach().cpu().numpy(), "ndarray"), (lambda x: 0.5, "float")],
]
MISSING = [(lambda x: None, "None")]
STRIDES = [(lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2), "stride")]
STATES = [
    (lambda x: x.transpose(2, 3), r"\(2, 3, 6, 5\)"),  # the papers' form
    *[(lambda x: x[0], r"\(3, 5, 6\)"), (shorter(0), r"\(1, 3, 5, 6\)"), (shorter(1), r"\(2, 2, 5, 6\)")],
    *[(shorter(2), r"\(2, 3, 4, 6\)"), (shorter(3), r"\(2, 3, 5, 5\)"), (to(torch.bfloat16), "bfloat16")],
]
CHANGES = {
    **dict.fromkeys(("q", "k"), SHAPES + LAST + KINDS + MISSING + STRIDES),
    "v": SHAPES + KINDS + MISSING + STRIDES,
    **dict.fromkeys(("log_gate", "beta"), SHAPES + KINDS + MISSING),
    **dict.fromkeys(("log_key_decay", "log_value_decay", "erase"), SHAPES + LAST + KINDS),
    "initial_state": STATES + KINDS,
}


def filled(value: float) -> Callable[[Tensor], Tensor]:
    def fill(x: Tensor) -> Tensor:
        x = x.detach().clone()
        x.view(-1)[x.numel() // 2] = value
        return x

    return fill


NOT_FINITE = (torch.nan, torch.inf, -torch.inf)
VALUES = {"beta": (1.001, -1e-3), **dict.fromkeys(("log_gate", "log_key_decay", "log_value_decay"), (1e-3, 5.0))}


def refusal(rule: RuleCase, inputs: Inputs, backend: str = "auto", **options: object) -> str:
    """The error's text; "" if there is none."""
    try:
        rule.run(inputs, backend, **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rule", [*PRINCIPAL, RULE["two gates"]])
def test_wrong_shapes_types_devices_and_values_are_named(rule):
    """By every backend; values where that was asked for. A switch of the checks is a context."""
    inputs, backends = rule.inputs(**SIZES), itertools.cycle(BUILT)
    for name in (name for name, x in inputs.items() if x is not None):
        # q, k and v are held against one another: where two disagree, either may be the one named.
        either = "[qkv]" if name in ("q", "k", "v") else name
        for (change, was), backend in zip(CHANGES[name], backends, strict=False):
            said = refusal(rule, inputs | {name: change(inputs[name])}, backend)
            assert re.search(rf"\b{either}\b.*\bmust\b", said) and re.search(was, said), f"{name}, {was}: {said!r}"
        for value, backend in zip(NOT_FINITE + VALUES.get(name, ()), backends, strict=False):
            wrong = inputs | {name: filled(value)(inputs[name])}
            assert not refusal(rule, wrong), "off"
            with ops.check_values(True):
                assert re.search(rf"\b{name}\b.*\bmust\b", refusal(rule, wrong, backend)), (name, value)
            assert not refusal(rule, wrong), "off again"


@pytest.mark.parametrize("rule", PRINCIPAL)
def test_a_step_in_place_refuses_what_the_reference_refuses(rule):
    """In the same words; and the state is as before."""
    inputs = rule.inputs(**SIZES | {"T": 1}, requires_grad=False)
    before = inputs["initial_state"].clone()
    for name in (name for name, x in inputs.items() if x is not None):
        for change, _ in CHANGES[name]:
            wrong = inputs | {name: change(inputs[name])}
            said = refusal(rule, wrong, "reference", in_place=True)
            assert said and said == refusal(rule, wrong, in_place=True), name
            assert torch.equal(inputs["initial_state"], before), name
    # Heads of q that divide those of v as those of k do; documents' starts.
    starts = [torch.ones(1, 2, dtype=torch.bool), torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool, device="meta")]
    cases = [(inputs | {"q": inputs["q"][:, :, :1]}, None), *((inputs, x) for x in starts)]
    for wrong, x in cases:
        said = refusal(rule, wrong, "reference", in_place=True, starts=x)
        assert said and said == refusal(rule, wrong, in_place=True, starts=x)
        assert torch.equal(inputs["initial_state"], before), said


def test_a_fault_of_a_kernel_is_raised_and_the_step_not_tried_again(monkeypatch):
    def fails(*inputs: object, state: Tensor, **options: object) -> Tensor:
        state += 1
        raise RuntimeError("a bug")

    monkeypatch.setattr(kernels.Kernel, "step_", fails)
    inputs = RULE["delta"].inputs(**SIZES | {"T": 1}, requires_grad=False)
    before = inputs["initial_state"].clone()
    with pytest.raises(RuntimeError, match="a bug"):
        RULE["delta"].run(inputs, "auto", in_place=True)
    assert torch.equal(inputs["initial_state"], before + 1)


def test_what_only_some_inputs_can_have_wrong():
    """States of another type than theirs; no heads or dimensions; heads of k; starts; write strengths above 2."""
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    for dtype, wrong in ((double, single), (half, half), (torch.float16, torch.float16), (half, double)):
        inputs = inputs_of("sum", dtype=dtype)
        said = refusal(RULE["sum"], inputs | {"initial_state": inputs["initial_state"].to(wrong)})
        assert re.search(rf"\binitial_state\b.*{wrong}.*\bmust\b", said)
    inputs = inputs_of("sum", initial_state=False)
    for names, dim in (("qkv", 2), ("qk", 3), ("v", 3)):
        none = {name: inputs[name].narrow(dim, 0, 0) for name in names}
        assert "heads, key_dim and value_dim must be at least 1" in refusal(RULE["sum"], inputs | none), (names, dim)
    said = refusal(RULE["sum"], inputs | {name: inputs[name][:, :, :2] for name in "qk"})
    assert "the heads of v, 3, must be those of k, 2, or a multiple" in said
    for starts, message in (
        ([[True] * 7], "starts is of list; it must be a tensor of torch.bool"),
        (torch.ones(2, 7), "starts is of torch.float32; it must be a tensor of torch.bool"),
        (torch.ones(7, 2, dtype=torch.bool), "starts has shape (7, 2); it must be (2, 7), (batch, time)"),
        (torch.ones(2, 7, dtype=torch.bool, device="meta"), "starts is on device meta; it must be on that of v"),
    ):
        assert message in refusal(RULE["sum"], inputs, starts=starts)
    two = inputs_of("sum", K=2)
    assert "q has strides" in refusal(
        RULE["sum"], two | {"q": two["q"].transpose(-1, -2).contiguous().transpose(-1, -2)}
    )
    inputs = inputs_of("gated delta")
    with ops.check_values(True):
        said = refusal(RULE["gated delta"], inputs | {"beta": filled(2.01)(inputs["beta"])})
    assert re.search(r"beta ranges from .* to 2.01; it must be in \[0, 2\]", said)


# Also where there is nothing to compute: a wrong name is wrong on an empty batch too.
@pytest.mark.parametrize("sizes", [{}, {"B": 0}, {"T": 0}, {"T": 1}], ids=str)
def test_backends_that_are_not_there(sizes, monkeypatch):
    """A name that none has, a device, or kernels that were not built: and nothing else runs in its place."""
    monkeypatch.setitem(ops.libraries._outcomes, DEVICE.type, "the kernels were lost; build them with care")
    for rule in PRINCIPAL:
        inputs = rule.inputs(**SIZES | sizes)
        for backend in ("fast", "", "Chunkwise", None, 3):
            said = refusal(rule, inputs, backend)
            assert all(name in said for name in ("backend", "auto", "reference", "chunkwise", "native", repr(backend)))
        lost = "'native' was asked for: the kernels were lost; build them with"
        with pytest.raises(ops.BackendUnavailable, match=lost):
            rule.run(inputs, "native")
    x = torch.zeros(1, 2, 1, 3, device="meta")
    with pytest.raises(ops.BackendUnavailable, match="no compiled kernels for devices of type meta, only for cpu and"):
        ops.sum_rule(x, x, x, backend="native")


@pytest.mark.parametrize("rule", RULES)
def test_auto_takes_the_kernels_where_they_are(rule, monkeypatch):
    """But for larger keys of rules that correct: on a GPU more than 512, over which no call can be divided."""
    assert ops.libraries.load(DEVICE.type) is None
    name, sizes = rule.operation_name, [(True, 5, 3), (False, 5, 3), (True, 17, 16), (True, 16, 17), (True, 16, 16)]
    for T, (there, K, V) in itertools.product((1, 70), sizes):
        with monkeypatch.context() as patch:
            if K > 5:
                patch.setitem(backends.LARGEST_DIM, DEVICE.type, 16)
            if not there:
                patch.setitem(ops.libraries._outcomes, DEVICE.type, "not built")
            taken = there and (K <= 16 or not rule.corrects)
            wanted = "native" if taken else "chunkwise" if T > 1 else "reference"
            inputs = rule.inputs(T=T, K=K, V=V, requires_grad=False)
            assert ops.chosen_backend(DEVICE, inputs["v"].dtype, T, name, K) == wanted
            assert_same(named(rule.run(inputs, "auto")), named(rule.run(inputs, wanted)), wanted)
            if there and not taken:
                allowed = f"take the {name} rule with key dimensions of up to 16, not 17; or use backend='chunkwise'"
                with pytest.raises(ops.BackendUnavailable, match=allowed):
                    rule.run(inputs, "native")


def test_an_operation_needs_no_more_than_a_reference():
    """Kernels that are built have none for it, and "auto" takes the best that it has."""
    given = ops.RULES["gated"]
    *values, start = inputs_of("gated").values()
    for known, wanted in ((given.chunkwise, "chunkwise"), (None, "reference")):
        own = ops.Rule("own", given.gates, given.reference, known)
        assert own.best_backend(DEVICE.type, torch.float32, 7, 5) == wanted
        assert own.best_backend(DEVICE.type, torch.float32, 1, 5) == "reference"
        expected = given(*values, initial_state=start, backend=wanted)
        assert_same(named(own(*values, initial_state=start)), named(expected), wanted)
        with pytest.raises(ops.BackendUnavailable, match=f"own rule has no compiled kernel; or use .*{wanted}"):
            own(*values, backend="native")
    q, k, v, log_gate = values
    unavailable, starts = ops.BackendUnavailable, torch.ones(2, 7, dtype=torch.bool, device=DEVICE)
    for error, message, inputs, options in (
        (unavailable, "own rule has no form that is parallel in time", values, {"backend": "chunkwise"}),
        (ValueError, "log_gate has shape", (q, k, v, log_gate[:1]), {}),
        (TypeError, "own rule was given 3 inputs; it must be q, k, v, log_gate", (q, k, v), {}),
        (ValueError, "own rule was given starts", values, {"starts": starts}),
        (ValueError, "own rule was given k of 1 heads for v of 3", (q[:, :, :1], k[:, :, :1], v, log_gate), {}),
    ):
        with pytest.raises(error, match=message):
            own(*inputs, **options)
    with pytest.raises(ValueError, match="rule is 'own'; it must be one of sum, gated, "):
        ops.chosen_backend(DEVICE, torch.float32, 7, "own")


@pytest.mark.parametrize("backend", BUILT)
@pytest.mark.parametrize("rule", RULES)
def test_in_place_writes_the_final_state_into_the_initial_one(rule, backend):
    """A graph that saved the state does not silently use the changed one; states of inference mode count nothing."""
    for T in (0, 1, 5):
        inputs = rule.inputs(T=T, requires_grad=False)
        expected = named(rule.run(inputs, backend))
        start = inputs["initial_state"].clone()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                state = start.clone()
                out, final_state = rule.run(inputs | {"initial_state": state}, backend, in_place=True)
            assert final_state is state
            assert_close(named((out, state)), expected, 1e-6)
        # A view is the state: a part of a wider one, whose other columns stay; or with keys and values turned round.
        wide, turned = start.new_full((*start.shape[:3], 7), 5.0), start.transpose(2, 3).contiguous()
        for whole, view in ((wide, wide[..., 2:5]), (turned, turned.transpose(2, 3))):
            view.copy_(start)
            loss = (whole * torch.ones_like(whole).requires_grad_()).sum()
            out, _ = rule.run(inputs | {"initial_state": view}, backend, in_place=True)
            assert_close(named((out, view)), expected, 1e-6)
            if T > 0:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
        assert (wide[..., [0, 1, 5, 6]] == 5).all()


def test_in_place_needs_a_state_that_can_be_written():
    rule, inputs = RULE["decay"], RULE["decay"].inputs(T=3, requires_grad=False)
    shared = inputs["initial_state"][:1].expand(inputs["initial_state"].shape)
    for changes, message in (
        ({"initial_state": None}, "initial_state is None and in_place is True"),
        ({"initial_state": torch._neg_view(shared.clone())}, "initial_state is a negative view"),
        ({"initial_state": shared}, r"initial_state has strides \(0, .*must not share memory"),
        *[({n: x.clone().requires_grad_()}, "in_place is True, but .* requires a gradient") for n, x in inputs.items()],
    ):
        with pytest.raises(ValueError, match=message):
            rule.run(inputs | changes, "auto", in_place=True)
    for name in RULE:  # a decode step goes another way
        step = RULE[name].inputs(T=1, requires_grad=False) | {"initial_state": None}
        with pytest.raises(ValueError, match="initial_state is None and in_place is True"):
            RULE[name].run(step, "auto", in_place=True)
    with torch.no_grad():
        rule.run(rule.inputs(T=3), "auto", in_place=True)
    # A state in the place of another argument would be a silent mistake: options go by name.
    with pytest.raises(TypeError, match="positional arguments"):
        ops.decay_rule(*inputs.values())


@pytest.mark.parametrize("rule", RULES)
def test_right_values_pass_the_checks(rule):
    """The ends of each range belong to it: log gates of 0 and -1e4, write strengths of 0, 1 and 2. So does nothing."""
    with ops.check_values(True):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            rule.run(rule.in_regimes(rule.regimes, **SIZES, dtype=dtype), "auto")
        for sizes in ({"B": 0}, {"T": 0}):
            rule.run(rule.inputs(**SIZES | sizes), "auto")


def test_the_switch_is_a_call_or_a_context():
    inputs = inputs_of("sum")
    inputs["q"] = filled(torch.nan)(inputs["q"])
    with ops.check_values(True):
        with ops.check_values(False):
            assert not refusal(RULE["sum"], inputs)
        assert refusal(RULE["sum"], inputs)
    with pytest.raises(KeyError), ops.check_values(True):
        raise KeyError
    assert not refusal(RULE["sum"], inputs)
    for enabled in (True, False):
        ops.check_values(enabled)
        assert bool(refusal(RULE["sum"], inputs)) == enabled


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
