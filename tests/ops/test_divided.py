"""Dimensions beyond those that one call of the kernels takes: divided, here from 16 on, and on a GPU from 512 on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fastweights.ops import backends, kernels
from fairseq_fastweights.ops.kernels import Kernel
from tests.ops.agreement import (
    assert_agrees,
    assert_autocast_does_not_reach_inside,
    assert_close,
    assert_same,
    relative_error,
)
from tests.ops.results import detached, in_float64, named, outcome
from tests.ops.rules import DEVICE, LAYOUT, PRINCIPAL, RULE, RULES, Inputs, RuleCase, deal, mapped

LARGEST = 16
MOST_ON_A_GPU = backends.LARGEST_DIM["cuda"]
# Keys, values and both in two and three parts, the last of which has 5 of 16, 1 or all.
SIZES = [(37, 5), (5, 37), (32, 33), (17, 48)]
HALF = 1e-2  # of up to three parts that were rounded: half of the promise
CALLS = [
    ({"T": 1, "dtype": torch.float32}, "out, final_state"),
    ({"T": 31, "dtype": torch.float64, "initial_state": False}, "out"),
    ({"T": 70, "dtype": torch.bfloat16, "extras_dtype": torch.float32}, "final_state"),
    ({"T": 70, "dtype": torch.float16}, "out, final_state"),
]


@pytest.fixture(autouse=True)
def small_largest_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.LARGEST_DIM, DEVICE.type, LARGEST)


def inputs_of(rule: RuleCase, K: int, V: int, **kwargs) -> Inputs:
    """Rules that correct are not divided over keys: they get fewer."""
    return rule.inputs(K=min(K, 13) if rule.corrects else K, V=V, **kwargs)


class Calls(TorchDispatchMode):
    """The compiled operators that run meanwhile, by name, with their arguments; and the names of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple]] = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == kernels.NAMESPACE:
            self.made.append((operation._opname, args))
        else:
            self.others.add(operation._opname)
        return operation(*args, **(kwargs or {}))


def test_the_limit_is_that_of_the_cuda_kernels():
    source = (Path(__file__).resolve().parents[2] / "cuda" / "recurrent" / "tile.cuh").read_text()
    assert f"kMostDim = {MOST_ON_A_GPU};" in source


@pytest.mark.parametrize(("rule", "size", "call"), deal(RULES, SIZES, CALLS))
def test_values_and_gradients(rule, size, call):
    how, use = call
    half = how["dtype"] in (torch.bfloat16, torch.float16)
    assert_agrees(rule, "native", inputs_of(rule, *size, **how), HALF if half else None, use=use)


@pytest.mark.parametrize("rule", PRINCIPAL)
def test_more_than_a_gpus_kernels_take(rule, monkeypatch):
    """FAVOR+'s default for heads of 64 has 532 features. And with decays that hardly decay and that erase."""
    regimes = [x for x in ("near one", "ordinary or erased") if x in rule.regimes] or ["ordinary"]
    assert_agrees(rule, "native", rule.in_regimes(regimes, T=70, K=13 if rule.corrects else 33, V=20), rows=regimes)
    monkeypatch.setitem(backends.LARGEST_DIM, DEVICE.type, MOST_ON_A_GPU)
    K, V = (5, 532) if rule.corrects else (532, 5)
    assert_agrees(rule, "native", rule.inputs(B=1, T=19, H=1, K=K, V=V))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_parts_of_keys_are_rounded_once_each_and_once_together(dtype):
    """Added up in 16 bits, 25 parts would have 4 times the error of one, which may be 1.5 times that of rounding."""
    inputs = RULE["sum"].inputs(T=70, K=400, V=16, dtype=dtype, requires_grad=False)
    expected = RULE["sum"].reference(in_float64(inputs))[0]
    rounding = relative_error(expected.to(dtype), expected)
    assert relative_error(RULE["sum"].run(inputs, "native")[0], expected) < 2.5 * rounding


@pytest.mark.parametrize("rule", RULES)
def test_as_any_call_of_the_kernels(rule):
    """Without autograd; under autocast; without data; where only one input needs a gradient."""
    for T in (1, 31):
        inputs = inputs_of(rule, 37, 20, T=T)
        expected = rule.run(inputs, "native")
        with torch.inference_mode():
            outputs = rule.run(inputs, "native")
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = rule.run(mapped(inputs, lambda x: mode.from_tensor(x)), "native")
        for x, y, fake in zip(outputs, expected, fakes, strict=True):
            assert not x.requires_grad and y.requires_grad and relative_error(x, y) <= 1e-6
            assert (x.shape, y.stride(), x.dtype, x.device) == (fake.shape, fake.stride(), fake.dtype, fake.device)
    everything, only_v = outcome(rule, "native", inputs), outcome(rule, "native", detached(inputs, but="v"))
    names = ["out", "final_state", "gradient of v"]
    assert_same(only_v, {name: everything[name] for name in names}, "where v alone needs one")
    for dtype in (torch.float32, torch.bfloat16):
        assert_autocast_does_not_reach_inside(rule, "native", dtype, K=13 if rule.corrects else 37, V=20, T=31)
    # Divided over keys, out lies as v does: fairseq's (time, batch, channel) needs no copy afterwards.
    inputs = inputs_of(rule, 37, 5, T=9)
    v = LAYOUT["as fairseq"](inputs["v"].detach())
    assert rule.run(inputs | {"v": v}, "native")[0].stride() == v.stride()


PARTS = [(532, 512, [272, 260]), (513, 512, [272, 241]), (512, 512, [512]), (1024, 512, [512, 512])]
PARTS += [(1025, 512, [352, 352, 321]), (17, 16, [16, 1]), (50, 16, [16, 16, 16, 2])]


@pytest.mark.parametrize(("dim", "largest", "parts"), PARTS)
def test_parts_are_few_even_and_aligned(dim, largest, parts, monkeypatch):
    monkeypatch.setitem(backends.LARGEST_DIM, DEVICE.type, largest)
    for name, along in (("sum", "K"), ("sum", "V"), ("decay", "K"), ("decay", "V"), ("delta", "V")):
        inputs = RULE[name].inputs(B=1, T=2, H=1, **{"K": 2, "V": 2} | {along: dim}, requires_grad=False)
        with Calls() as mode:
            RULE[name].run(inputs, "native")
        q, k, v = zip(*(arguments[:3] for _, arguments in mode.made), strict=True)
        assert [x.shape[-1] for x in (k if along == "K" else v)] == parts, (name, along)
        assert [x.shape for x in q] == [x.shape for x in k]
        assert {x.shape[-1] for x in (v if along == "K" else k)} == {2}


@pytest.mark.parametrize("rule", RULES)
def test_no_input_is_copied_and_no_gradient_padded(rule, monkeypatch):
    for T in (1, 31):
        inputs = inputs_of(rule, 37, 20, T=T)
        given = {x.untyped_storage().data_ptr() for x in inputs.values() if x is not None}
        with Calls() as mode:
            outcome(rule, "native", inputs)
        forward = [arguments for name, arguments in mode.made if name.endswith("forward")]
        tensors = [x for arguments in forward for x in arguments if isinstance(x, Tensor)]
        assert len(forward) == (2 if rule.corrects else 6)
        assert all(x.untyped_storage().data_ptr() in given for x in tensors)
        assert all(max(k.shape[-1], v.shape[-1]) <= LARGEST for _, k, v, *_ in forward)
        assert "cat" in mode.others and not mode.others & {"slice_backward", "select_backward", "constant_pad_nd"}
    # Dimensions within the limit are not looked at again.
    monkeypatch.setattr(Kernel, "_parts", None)
    for T in (1, 31):
        outcome(rule, "native", rule.inputs(T=T, K=LARGEST, V=LARGEST))


@pytest.mark.parametrize(
    ("rule", "size", "dtype"), deal(RULES, SIZES, [torch.float32, torch.float64, torch.bfloat16, torch.float16])
)
def test_steps_in_place(rule, size, dtype):
    """On a slice of a wider state, which is left alone beside it, and not copied; graphs that saved it are told."""
    inputs = inputs_of(rule, *size, T=5, dtype=dtype, requires_grad=False)
    expected = named(rule.reference(in_float64(inputs)))
    start = inputs.pop("initial_state")
    wide = start.new_full((*start.shape[:2], start.shape[2] + 1, size[1] + 1), 5.0)
    state = wide[:, :, 1:, : size[1]]
    state.copy_(start)
    outs, loss = [], (state * torch.ones_like(state).requires_grad_()).sum()
    for t in range(5):
        step = {n: None if x is None else x[:, t : t + 1] for n, x in inputs.items()}
        with Calls() as mode:
            out, final_state = rule.run(step | {"initial_state": state}, "native", in_place=True)
        assert final_state is state and mode.made and all(name.endswith("step_") for name, _ in mode.made)
        assert all(x.shape[-1] <= LARGEST for _, arguments in mode.made for x in arguments[:3])
        outs.append(out)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, HALF)
    assert_close(named((torch.cat(outs, 1), state)), expected, tolerance)
    assert all((beside == 5).all() for beside in (wide[:, :, 0], wide[..., size[1]]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
