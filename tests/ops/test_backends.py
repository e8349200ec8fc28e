"""Every backend in `rules.BACKENDS` against the float64 reference: outputs, final states and all gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.ops.agreement import (
    TOLERANCE,
    assert_agrees,
    assert_autocast_does_not_reach_inside,
    assert_close,
    assert_same,
)
from tests.ops.results import cotangents, definition, detached, differentiate, named, outcome
from tests.ops.rules import BACKENDS, LAYOUT, PRINCIPAL, RULE, RULES, deal, mapped, state_dtype
from tests.ops.test_selective_scan import SCANNED

# (T, K, V): one step, shorter than any chunk, primes, multiples of the usual chunks and one more and one less than
# those; K and V odd, even, 1, equal and not.
SHAPES = [(1, 5, 3), (2, 1, 1), (31, 3, 5), (64, 16, 16), (65, 33, 1), (127, 1, 33), (128, 32, 5), (193, 8, 64)]

# How a call is made: the dtypes of inputs and of gates and write strengths, whether there is a state to start from, and
# the outputs that the loss depends on.
CALLS = [
    {"dtype": torch.float32, "initial_state": True},
    {"dtype": torch.float64, "initial_state": False},
    {"dtype": torch.bfloat16, "initial_state": True},
    {"dtype": torch.float32, "initial_state": False, "use": "out"},
    {"dtype": torch.float64, "initial_state": True, "use": "final_state"},
    {"dtype": torch.float16, "extras_dtype": torch.float32, "initial_state": False},
    # Exact but for the gradient of the gates, which is rounded to float32: 6e-8.
    {"dtype": torch.float64, "extras_dtype": torch.float32, "initial_state": True, "tolerance": 1e-7},
    {"dtype": torch.bfloat16, "extras_dtype": torch.float32, "initial_state": False},
]

IN_EITHER_PRECISION = [(rule, (torch.float32, torch.bfloat16)[i % 2]) for i, rule in enumerate(RULES)]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize(("rule", "shape", "call"), deal(RULES, SHAPES, CALLS))
def test_shapes_and_dtypes(backend, rule, shape, call):
    (T, K, V), how = shape, dict(call)
    about = {name: how.pop(name) for name in ("use", "tolerance") if name in call}
    assert_agrees(rule, backend, rule.inputs(T=T, K=K, V=V, **how), **about)


# Without an initial state outputs are as small as the writes, and an error of those shows.
@pytest.mark.parametrize(
    ("dtype", "initial_state"), [(torch.float32, True), (torch.float32, False), (torch.float64, False)]
)
@pytest.mark.parametrize("rule", [rule for rule in RULES if len(rule.regimes) > 1])
def test_gates_and_write_strengths(backend, rule, dtype, initial_state):
    inputs = rule.in_regimes(rule.regimes, T=150, K=6, V=7, dtype=dtype, initial_state=initial_state)
    assert_agrees(rule, backend, inputs, rows=rule.regimes)


# The longest T that is promised: errors that accumulate do so here.
F32, BF16 = torch.float32, torch.bfloat16
LONG = [
    *[("sum", F32, ["ordinary"]), ("gated", F32, ["tiny", "near one"]), ("decay", F32, ["ordinary or tiny", "tiny"])],
    *[
        ("decay", BF16, ["near one"]),
        ("delta", F32, ["ordinary", "one", "repeated keys"]),
        ("delta", BF16, ["ordinary"]),
    ],
    ("Kimi delta", F32, ["zero, one or two", "ordinary or erased"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "regimes"), LONG)
def test_4096_steps(backend, name, dtype, regimes):
    inputs = RULE[name].in_regimes(regimes, B=1, T=4096, H=2, K=16, V=16, dtype=dtype)
    assert_agrees(RULE[name], backend, inputs, rows=regimes)


@pytest.mark.parametrize("rule", [*PRINCIPAL, *SCANNED])
def test_a_sequence_in_parts_is_the_sequence(backend, rule):
    """Forward and backward, gradients flowing from part to part through the state."""
    inputs = rule.inputs(T=100, dtype=torch.float64)
    outs, state = [], inputs["initial_state"]
    for steps in (slice(0, 1), slice(1, 64), slice(64, 64), slice(64, 100)):
        part = {name: x if name in ("A", "D") else x[:, steps] for name, x in inputs.items()}
        out, state = rule.run(part | {"initial_state": state}, backend)
        outs.append(out)
    outputs = torch.cat(outs, 1), state
    weights = cotangents(outputs)
    actual = named(outputs, differentiate(outputs, inputs, weights))
    assert_close(actual, definition(rule, inputs, weights), TOLERANCE[torch.float64])


# Of the inputs, and of the gradients of the outputs.
LAYOUTS = [
    *[("as fairseq", "turned"), ("a slice", "as fairseq"), ("heads first", "a slice"), ("constant", "one number")],
    *[("same for all rows", "heads first"), ("same for all heads", "windows"), ("windows", "constant")],
    *[("windows of time", "windows of heads"), ("windows of heads", "windows of time")],
]


@pytest.mark.parametrize(("layout", "of_gradients"), LAYOUTS)
@pytest.mark.parametrize("rule", PRINCIPAL)
def test_any_strides(backend, rule, layout, of_gradients):
    inputs = mapped(rule.inputs(T=70, K=5, V=3), lambda x: LAYOUT[layout](x.detach()).requires_grad_())
    assert not any(inputs[name].is_contiguous() for name in "qkv")
    assert_agrees(rule, backend, inputs, lay=LAYOUT[of_gradients])


@pytest.mark.parametrize("rule", PRINCIPAL)
def test_a_last_dimension_of_one_is_contiguous_whatever_its_stride(backend, rule):
    inputs = rule.inputs(T=9, K=1, V=1)
    inputs |= {n: torch.stack([inputs[n].detach()] * 4, -1)[..., 0].requires_grad_() for n in "qkv"}
    assert inputs["q"].stride(-1) == 4
    assert_agrees(rule, backend, inputs)


@pytest.mark.parametrize("rule", RULES)
def test_empty_batches_and_sequences(backend, rule):
    for B, T, dtype, initial_state in (
        *[(0, 5, torch.float32, True), (2, 0, torch.bfloat16, True), (2, 0, torch.float64, False)],
        *[(0, 0, torch.float64, True), (0, 100, torch.float32, False)],
    ):
        inputs = rule.inputs(B=B, T=T, H=3, K=4, V=5, dtype=dtype, initial_state=initial_state)
        out, final_state = rule.run(inputs, backend)
        assert out.shape == (B, T, 3, 5) and out.dtype == dtype
        assert final_state.shape == (B, 3, 4, 5) and final_state.dtype == state_dtype(dtype)
        start = inputs["initial_state"]
        assert torch.equal(final_state, torch.zeros_like(final_state) if start is None else start)
        # Backward: nothing but the state, which passes through.
        (out.sum() + 3 * final_state.sum()).backward()
        for name in ("q", "k", "v"):
            grad = inputs[name].grad
            assert grad is None or (grad.shape == inputs[name].shape and not grad.any())
        if start is not None:
            assert torch.equal(start.grad, torch.full_like(start, 3.0))
    # An output of no steps can be differentiated in each input alone, as any other; gates are float32, to mix dtypes.
    drawn = rule.inputs(T=0, dtype=torch.bfloat16, extras_dtype=torch.float32)
    for name in (n for n, x in drawn.items() if x is not None):
        inputs = detached(drawn, but=name)
        out, _ = rule.run(inputs, backend)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        grad = inputs[name].grad
        assert grad.shape == inputs[name].shape and grad.dtype == inputs[name].dtype and not grad.any(), name


@pytest.mark.parametrize("rule", [*RULES, *SCANNED])
def test_only_what_needs_a_gradient_gets_one(backend, rule):
    """And it is the same gradient as when everything needs one."""
    everything = rule.inputs(T=70, dtype=torch.float64)
    expected = outcome(rule, backend, everything)
    for name in (n for n, x in everything.items() if x is not None):
        actual = outcome(rule, backend, detached(everything, but=name))
        wanted = {n: expected[n] for n in ("out", "final_state", f"gradient of {name}")}
        assert_close(actual, wanted, TOLERANCE[torch.float64])


@pytest.mark.parametrize("rule", [*RULES, *SCANNED])
def test_the_same_bits_however_it_is_called(backend, rule):
    """Twice, with activation checkpointing, without autograd; and outputs may be overwritten, as generation does."""
    inputs = rule.inputs(T=130, K=33, V=17)
    expected = outcome(rule, backend, inputs)
    outputs = rule.run(inputs, backend)
    weights = cotangents(outputs)
    assert_same(named(outputs), named((expected["out"], expected["final_state"])), "the second time")
    for x in outputs:
        x.detach().fill_(7.0)
    again = named((expected["out"], expected["final_state"]), differentiate(outputs, inputs, weights))
    assert_same(again, expected, "after its outputs were overwritten")

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return rule.run(dict(zip(inputs, tensors, strict=True)), backend)

    for reentrant in (True, False):
        leaves = mapped(inputs, lambda x: x.detach().requires_grad_())
        recomputed = checkpoint(run, *leaves.values(), use_reentrant=reentrant)
        # backward(), as the reentrant kind does not work with torch.autograd.grad.
        torch.autograd.backward(recomputed, weights)
        grads = {name: x.grad for name, x in leaves.items() if x is not None}
        assert_same(named(recomputed, grads), expected, f"with checkpointing, {reentrant=}")

    plain = named((expected["out"], expected["final_state"]))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            without = rule.run(inputs, backend)
        assert not any(x.requires_grad for x in without)
        assert_same(named(without), plain, f"under {mode.__name__}")
    assert not any(x.requires_grad for x in rule.run(detached(inputs), backend))


@pytest.mark.parametrize("rule", [*RULES, *SCANNED])
def test_the_two_states_are_no_one_memory(backend, rule):
    for T in (0, 1, 70):
        inputs = rule.inputs(T=T)
        before = inputs["initial_state"].detach().clone()
        rule.run(inputs, backend)[1].detach().fill_(7.0)
        assert torch.equal(inputs["initial_state"], before)


@pytest.mark.parametrize("rule", [*PRINCIPAL, *SCANNED])
def test_second_derivatives_are_refused(backend, rule):
    """Not silently wrong: the backward pass is not made of operations that autograd has seen.

    For each pair of inputs, as torch goes around errors that do not lead to the requested gradients.
    """
    inputs = rule.inputs(T=5)
    names = [name for name, x in inputs.items() if x is not None]
    for one, other in itertools.product(names, repeat=2):
        leaves = mapped(inputs, Tensor.detach)
        leaves[one].requires_grad_(), leaves[other].requires_grad_()
        out, _ = rule.run(leaves, backend)
        weights = torch.ones_like(out).requires_grad_()
        (grad,) = torch.autograd.grad((out * weights).sum(), leaves[one], create_graph=True)
        for of in (leaves[other], weights):
            with pytest.raises(RuntimeError, match="differentiated twice; backend='reference' can"):
                torch.autograd.grad(grad.sum(), of, allow_unused=True, retain_graph=True)


@pytest.mark.parametrize(("rule", "dtype"), [*IN_EITHER_PRECISION, *((x, torch.bfloat16) for x in SCANNED)])
def test_autocast_does_not_reach_inside(backend, rule, dtype):
    assert_autocast_does_not_reach_inside(rule, backend, dtype)


def tensors_in(value: object) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def kept_for_backward(outputs: tuple[Tensor, Tensor], saved: dict[int, int]) -> int:
    """The bytes that a graph keeps alive: tensors `saved` through autograd, and those in attributes of contexts."""
    kept, nodes, seen = dict(saved), [x.grad_fn for x in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            storages = [x.untyped_storage() for x in tensors_in(getattr(node, "__dict__", {}))]
            kept |= {x.data_ptr(): x.nbytes() for x in storages}
    return sum(kept.values())


@pytest.mark.parametrize(("rule", "dtype"), IN_EITHER_PRECISION)
def test_training_keeps_a_state_per_chunk_and_not_per_step(backend, rule, dtype):
    B, T, H, K, V = 1, 1024, 2, 32, 32
    inputs, saved = rule.inputs(B=B, T=T, H=H, K=K, V=V, dtype=dtype), {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = rule.run(inputs, backend)
    state_per_step, smallest_chunk = 4 * B * H * T * K * V, 16
    allowed = sum(x.numel() * x.element_size() for x in (*inputs.values(), *outputs) if x is not None)
    allowed += state_per_step // smallest_chunk
    assert kept_for_backward(outputs, saved) <= allowed + 4096
    assert allowed < state_per_step / 3  # the claim is worth something at these sizes


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest storage that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tensors_in(result)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("rule", RULES)
def test_no_tensor_holds_a_state_per_step_even_for_a_moment(backend, rule):
    """In the forward pass or the backward pass."""
    B, T, H, K, V = 1, 1024, 2, 64, 64
    inputs = rule.inputs(B=B, T=T, H=H, K=K, V=V)
    with LargestTensor() as largest:
        outcome(rule, backend, inputs)
    assert 0 < largest.elements <= B * H * T * K * V / 4
