"""Dimensions beyond those that one call of the kernels takes: divided, here from 16 on, and on a GPU from 512 on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fastweights import ops
from fairseq_fastweights.ops import divided, native
from tests.ops.rules import (
    DEVICE,
    RULE,
    RULES,
    Inputs,
    Rule,
    assert_agrees,
    assert_close,
    cotangents,
    differentiate,
    in_float64,
    label,
    relative_error,
)

LARGEST = 16
PRINCIPAL = [RULE[name] for name in ("sum", "gated", "decay", "delta")]
# Keys, values and both in two and three parts, the last of which has 5 of 16, 1 or all.
SIZES = [(37, 5), (5, 37), (32, 33), (17, 48)]


@pytest.fixture(autouse=True)
def small_largest_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.libraries.load(DEVICE.type) is None
    monkeypatch.setitem(native.LARGEST_DIM, DEVICE.type, LARGEST)


def inputs_of(rule: Rule, K: int, V: int, **kwargs) -> Inputs:
    """The delta rule is not divided over keys: it gets fewer."""
    return rule.inputs(K=min(K, 13) if rule.name == "delta" else K, V=V, **kwargs)


def outcome(rule: Rule, inputs: Inputs) -> dict[str, Tensor | None]:
    outputs = rule.run(inputs, "native")
    return dict(zip(("out", "final_state"), outputs, strict=True)) | differentiate(outputs, inputs, cotangents(outputs))


class Calls(TorchDispatchMode):
    """The compiled operators that run meanwhile, by name, with their arguments; and the names of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple]] = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == native.NAMESPACE:
            self.made.append((operation._opname, args))
        else:
            self.others.add(operation._opname)
        return operation(*args, **(kwargs or {}))


# Values


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("T", [1, 31, 70])
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_values_and_gradients(rule, K, V, T, initial_state):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        inputs = inputs_of(rule, K, V, B=1, T=T, dtype=dtype, initial_state=initial_state)
        assert_agrees(rule, "native", inputs, tolerance)


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_more_than_a_gpus_kernels_take(rule, monkeypatch):
    """FAVOR+'s default for heads of 64 has 532 features."""
    monkeypatch.setitem(native.LARGEST_DIM, DEVICE.type, native.LARGEST_DIM["cuda"])
    K, V = (5, 532) if rule.name == "delta" else (532, 5)
    assert_agrees(rule, "native", rule.inputs(B=1, T=19, H=1, K=K, V=V), 1e-5)


@pytest.mark.parametrize("regime", ["near one", "ordinary or erased"])
@pytest.mark.parametrize("name", ["gated", "decay", "decay of keys", "decay of values"])
def test_decays_that_hardly_decay_and_that_erase(name, regime):
    assert_agrees(RULE[name], "native", RULE[name].inputs(T=70, K=33, V=20, regime=regime), 1e-5)


@pytest.mark.parametrize("extras", ["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=label)
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_half_precision(rule, K, V, dtype, extras):
    """What is added up was rounded part by part; with up to three parts that takes half of what is promised at most."""
    extras_dtype = torch.float32 if extras == "float32" else None
    inputs = inputs_of(rule, K, V, T=70, dtype=dtype, extras_dtype=extras_dtype)
    assert_agrees(rule, "native", inputs, 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=label)
def test_many_parts_of_keys_are_rounded_once_each_and_once_together(dtype):
    """Added up in 16 bits, one after the other, outputs of 25 parts would have 4 times the error of one.

    Of one the CUDA kernels may have 1.5 times that of rounding alone.
    """
    inputs = RULE["sum"].inputs(T=70, K=400, V=16, dtype=dtype, requires_grad=False)
    expected = RULE["sum"].reference(in_float64(inputs))[0]
    rounding = relative_error(expected.to(dtype), expected)
    assert relative_error(RULE["sum"].run(inputs, "native")[0], expected) < 2.5 * rounding


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_loss_of_one_output_alone(rule):
    for use in ("out", "final_state"):
        assert_agrees(rule, "native", inputs_of(rule, 37, 20, dtype=torch.float64), 1e-11, use=use)


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_only_what_needs_a_gradient_gets_one(rule):
    everything = inputs_of(rule, 37, 20)
    expected = outcome(rule, everything)
    for name in (n for n, x in everything.items() if x is not None):
        inputs = {n: None if x is None else x.detach().requires_grad_(n == name) for n, x in everything.items()}
        actual = outcome(rule, inputs)
        assert list(actual) == ["out", "final_state", name]
        assert_close(actual, {n: expected[n] for n in actual}, 1e-6)


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_without_autograd(rule):
    for T in (1, 31):
        inputs = inputs_of(rule, 37, 20, T=T)
        expected = rule.run(inputs, "native")
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                outputs = rule.run(inputs, "native")
            for x, y in zip(outputs, expected, strict=True):
                assert not x.requires_grad and y.requires_grad and relative_error(x, y) <= 1e-6


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_no_rows_and_no_steps(rule):
    for B, T in ((0, 5), (2, 0)):
        inputs = inputs_of(rule, 37, 20, B=B, T=T)
        out, final_state = rule.run(inputs, "native")
        assert out.shape == inputs["v"].shape and torch.equal(final_state, inputs["initial_state"])
        (out.sum() + final_state.sum()).backward()
        assert torch.equal(inputs["initial_state"].grad, torch.ones_like(final_state))


def test_one_decay_for_all_keys_stays_one_in_every_part():
    """Retention: a decay per head, expanded, which each part runs as the gate that it is."""
    inputs = RULE["decay of keys"].inputs(T=31, K=37, requires_grad=False)
    one = inputs["log_key_decay"][..., :1]
    with Calls() as mode:
        outputs = ops.decay_rule(**inputs | {"log_key_decay": one.expand_as(inputs["k"])}, backend="native")
    assert all(arguments[3] is not None and arguments[5] is None for _, arguments in mode.made)
    expected = ops.decay_rule(**inputs | {"log_key_decay": one.repeat(1, 1, 1, 37)}, backend="native")
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


# The calls that are made


@pytest.mark.parametrize(
    ("dim", "largest", "parts"),
    [
        (532, 512, [272, 260]),
        (513, 512, [272, 241]),
        (512, 512, [512]),
        (1024, 512, [512, 512]),
        (1025, 512, [352, 352, 321]),
        (17, 16, [16, 1]),
        (50, 16, [16, 16, 16, 2]),
    ],
)
@pytest.mark.parametrize("name", ["sum", "decay", "delta"])
def test_parts_are_few_even_and_aligned(name, dim, largest, parts, monkeypatch):
    monkeypatch.setitem(native.LARGEST_DIM, DEVICE.type, largest)
    whole, divides = {"K": 2, "V": 2}, ("V",) if name == "delta" else ("K", "V")
    for along in divides:
        inputs = RULE[name].inputs(B=1, T=2, H=1, **whole | {along: dim}, requires_grad=False)
        with Calls() as mode:
            RULE[name].run(inputs, "native")
        q, k, v = zip(*(arguments[:3] for _, arguments in mode.made), strict=True)
        assert [x.shape[-1] for x in (k if along == "K" else v)] == parts
        assert [x.shape for x in q] == [x.shape for x in k]
        assert {x.shape[-1] for x in (v if along == "K" else k)} == {2}


@pytest.mark.parametrize("T", [1, 31])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_no_input_is_copied_and_no_gradient_padded(rule, T):
    inputs = inputs_of(rule, 37, 20, T=T)
    given = {x.untyped_storage().data_ptr() for x in inputs.values() if x is not None}
    with Calls() as mode:
        outcome(rule, inputs)
    forward = [arguments for name, arguments in mode.made if name.endswith("forward")]
    tensors = [x for arguments in forward for x in arguments if isinstance(x, Tensor)]
    assert len(forward) == (2 if rule.name == "delta" else 6)
    assert all(x.untyped_storage().data_ptr() in given for x in tensors)
    assert all(max(k.shape[-1], v.shape[-1]) <= LARGEST for _, k, v, *_ in forward)
    assert "cat" in mode.others and not mode.others & {"slice_backward", "select_backward", "constant_pad_nd"}


@pytest.mark.parametrize("T", [1, 31])
def test_the_delta_rules_keys_are_never_divided(T):
    """What a step writes depends on all of them. On a GPU the kernels refuse what is left too large."""
    inputs = RULE["delta"].inputs(T=T, K=37, V=20)
    with Calls() as mode:
        _, final_state = divided.delta_rule(**inputs)
        if T == 1:
            with torch.no_grad():
                divided.delta_step_(**{n: x for n, x in inputs.items() if n != "initial_state"}, state=final_state)
    assert {arguments[1].shape[-1] for _, arguments in mode.made} == {37}


def test_dimensions_within_the_limit_are_not_looked_at_again(monkeypatch):
    monkeypatch.setattr(divided, "_parts", None)
    for rule in RULES:
        for T in (1, 31):
            outcome(rule, rule.inputs(T=T, K=LARGEST, V=LARGEST))


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_out_lies_as_v_does(rule):
    """Divided over keys: fairseq's (time, batch, channel) needs no copy afterwards."""
    inputs = inputs_of(rule, 37, 5, T=9)
    inputs["v"] = inputs["v"].detach().transpose(0, 1).contiguous().transpose(0, 1)
    out, _ = rule.run(inputs, "native")
    assert out.stride() == inputs["v"].stride() and out.transpose(0, 1).is_contiguous()


# Steps in place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=label)
@pytest.mark.parametrize(("K", "V"), SIZES)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_steps_in_place(rule, K, V, dtype):
    """On a state that is a slice of a wider one, which is left alone beside it, and not copied."""
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 1e-2)
    inputs = inputs_of(rule, K, V, T=5, dtype=dtype, requires_grad=False)
    expected = rule.reference(in_float64(inputs))
    start = inputs.pop("initial_state")
    wide = start.new_full((*start.shape[:2], start.shape[2] + 1, V + 1), 5.0)
    state = wide[:, :, 1:, :V]
    state.copy_(start)
    outs = []
    for t in range(5):
        step = {name: None if x is None else x[:, t : t + 1] for name, x in inputs.items()}
        with Calls() as mode:
            out, final_state = getattr(ops, rule.operation)(
                **step, initial_state=state, in_place=True, backend="native"
            )
        assert final_state is state and mode.made and all(name.endswith("step_") for name, _ in mode.made)
        outs.append(out)
    assert_close(
        {"out": torch.cat(outs, 1), "state": state}, dict(zip(("out", "state"), expected, strict=True)), tolerance
    )
    assert torch.equal(wide[:, :, 0], torch.full_like(wide[:, :, 0], 5.0))
    assert torch.equal(wide[..., V], torch.full_like(wide[..., V], 5.0))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_in_place_in_every_mode(rule, T, mode):
    inputs = inputs_of(rule, 37, 20, T=T, requires_grad=mode is torch.no_grad)
    expected = rule.reference(in_float64(inputs))
    with mode():
        state = inputs["initial_state"].clone()
        changed = inputs | {"initial_state": state}
        out, final_state = getattr(ops, rule.operation)(**changed, in_place=True, backend="native")
    assert final_state is state
    assert_close({"out": out, "state": state}, dict(zip(("out", "state"), expected, strict=True)), 1e-5)


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_state_turned_in_memory_changes_in_place(rule):
    """Keys contiguous and not values, which no step takes where it lies."""
    inputs = inputs_of(rule, 37, 20, T=1, requires_grad=False)
    expected = rule.reference(in_float64(inputs))
    state = inputs["initial_state"].transpose(2, 3).contiguous().transpose(2, 3)
    changed = inputs | {"initial_state": state}
    out, _ = getattr(ops, rule.operation)(**changed, in_place=True, backend="native")
    assert_close({"out": out, "state": state}, dict(zip(("out", "state"), expected, strict=True)), 1e-5)


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_graph_that_saved_the_state_does_not_use_what_it_became(rule, T):
    inputs = inputs_of(rule, 37, 20, T=T, requires_grad=False)
    loss = (inputs["initial_state"] * torch.ones_like(inputs["initial_state"]).requires_grad_()).sum()
    with torch.no_grad():
        getattr(ops, rule.operation)(**inputs, backend="native", in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# torch's other ways to run it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_autocast_does_not_reach_inside(rule, dtype):
    inputs = inputs_of(rule, 37, 20, T=31, dtype=dtype, extras_dtype=torch.float32)
    expected = outcome(rule, inputs)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        actual = outcome(rule, inputs)
    for name, x in actual.items():
        assert x.dtype == expected[name].dtype and torch.equal(x, expected[name]), name


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_second_derivatives_are_refused(rule):
    inputs = inputs_of(rule, 37, 20, T=5)
    out, _ = rule.run(inputs, "native")
    for name in ("q", "k", "v"):
        (grad,) = torch.autograd.grad(out.square().sum(), inputs[name], create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.sum().backward()


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_forward_mode_is_refused(rule, T):
    inputs = inputs_of(rule, 37, 20, T=T, requires_grad=False)
    with pytest.raises(NotImplementedError, match="carries a tangent"):
        torch.func.jvp(lambda x: rule.run(inputs | {"v": x}, "native"), (inputs["v"],), (inputs["v"],))


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_shapes_without_data_are_those_with_it(rule):
    for T in (1, 31):
        inputs = inputs_of(rule, 37, 20, T=T, requires_grad=False)
        real = rule.run(inputs, "native")
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = rule.run({n: None if x is None else mode.from_tensor(x) for n, x in inputs.items()}, "native")
        for x, y in zip(real, fake, strict=True):
            assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


@pytest.mark.slow
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_torch_compile(rule):
    """One graph, forward and backward, for any number of steps; "aot_eager" needs no compiler."""
    names = list(rule.inputs())
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: rule.run(dict(zip(names, x, strict=True)), "native"), backend="aot_eager", fullgraph=True
    )
    for B, T in ((2, 20), (2, 20), (3, 33), (1, 70)):
        inputs = inputs_of(rule, 37, 20, B=B, T=T)
        outputs = compiled(*inputs.values())
        actual = dict(zip(("out", "final_state"), outputs, strict=True))
        actual |= differentiate(outputs, inputs, cotangents(outputs))
        assert_close(actual, outcome(rule, inputs), 1e-6)
    with torch.no_grad():
        inputs = inputs_of(rule, 37, 20, T=1)
        for x, y in zip(compiled(*inputs.values()), rule.run(inputs, "native"), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_torch_compile_of_steps_in_place(rule):
    def run(inputs: Inputs, state: Tensor) -> Tensor:
        changed = inputs | {"initial_state": state}
        out, final_state = getattr(ops, rule.operation)(**changed, backend="native", in_place=True)
        assert final_state is state
        return out

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            state = inputs_of(rule, 37, 20, T=1, requires_grad=False)["initial_state"].clone()
            expected_state = state.clone()
            for seed in range(3):
                inputs = inputs_of(rule, 37, 20, T=1, requires_grad=False, seed=seed)
                torch.testing.assert_close(compiled(inputs, state), run(inputs, expected_state))
                torch.testing.assert_close(state, expected_state)
