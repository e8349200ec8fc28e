"""Every backend against the float64 reference: outputs, final states and all gradients.

A backend joins by its name in `rules.BACKENDS`, a rule by its row in `rules.RULES`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.ops.rules import (
    BACKENDS,
    DEVICE,
    PRINCIPAL,
    RULE,
    RULES,
    TOLERANCE,
    Inputs,
    assert_agrees,
    assert_autocast_does_not_reach_inside,
    assert_close,
    assert_same,
    cotangents,
    deal,
    definition,
    differentiate,
    label,
    named,
    outcome,
    state_dtype,
)

# (T, K, V): one step, shorter than any chunk, primes, multiples of the usual chunks and one more
# and one less than those; K and V odd, even, 1, equal and not.
SHAPES = [
    (1, 5, 3),
    (2, 1, 1),
    (31, 3, 5),
    (64, 16, 16),
    (65, 33, 1),
    (127, 1, 33),
    (128, 32, 5),
    (193, 8, 64),
]

# How a call is made: the dtypes of inputs and of gates and write strengths, whether there is a state to start from, and
# what the loss is of.
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


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN, so that whoever reads what was never written is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    # On a GPU torch's cumulative sums, which chunkwise takes, have no other algorithm.
    torch.use_deterministic_algorithms(True, warn_only=DEVICE.type != "cpu")
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def detached(inputs: Inputs, *, but: str = "") -> Inputs:
    """The same numbers, none of which needs a gradient but the one that is named."""
    return {name: None if x is None else x.detach().requires_grad_(name == but) for name, x in inputs.items()}


# Values


@pytest.mark.parametrize(("rule", "shape", "call"), deal(RULES, SHAPES, CALLS), ids=label)
def test_shapes_and_dtypes(backend, rule, shape, call):
    T, K, V = shape
    how = {name: value for name, value in call.items() if name not in ("use", "tolerance")}
    about = {name: value for name, value in call.items() if name in ("use", "tolerance")}
    assert_agrees(rule, backend, rule.inputs(T=T, K=K, V=V, **how), **about)


# With no state to start from, outputs are as small as the writes, and what those lack shows.
@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=label)
@pytest.mark.parametrize("rule", [rule for rule in RULES if len(rule.regimes) > 1], ids=label)
def test_gates_and_write_strengths(backend, rule, dtype, initial_state):
    inputs = rule.in_regimes(rule.regimes, T=150, K=6, V=7, dtype=dtype, initial_state=initial_state)
    assert_agrees(rule, backend, inputs, rows=rule.regimes)


# The longest T that is promised: what accumulates does so here.
LONG = [
    ("sum", torch.float32, ["ordinary"]),
    ("gated", torch.float32, ["tiny", "near one"]),
    ("decay", torch.float32, ["ordinary or tiny", "tiny"]),
    ("decay", torch.bfloat16, ["near one"]),
    ("delta", torch.float32, ["ordinary", "one", "repeated keys"]),
    ("delta", torch.bfloat16, ["ordinary"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "regimes"), LONG, ids=label)
def test_4096_steps(backend, name, dtype, regimes):
    inputs = RULE[name].in_regimes(regimes, B=1, T=4096, H=2, K=16, V=16, dtype=dtype)
    assert_agrees(RULE[name], backend, inputs, rows=regimes)


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_sequence_in_parts_is_the_sequence(backend, rule):
    """Forward and backward, gradients flowing from part to part through the state."""
    inputs = rule.inputs(T=100, dtype=torch.float64)
    outs, state = [], inputs["initial_state"]
    for steps in (slice(0, 1), slice(1, 64), slice(64, 64), slice(64, 100)):
        part = {name: None if x is None else x[:, steps] for name, x in inputs.items()}
        out, state = rule.run(part | {"initial_state": state}, backend)
        outs.append(out)
    outputs = torch.cat(outs, 1), state
    weights = cotangents(outputs)
    actual = named(outputs, differentiate(outputs, inputs, weights))
    assert_close(actual, definition(rule, inputs, weights), TOLERANCE[torch.float64])


# Layouts


def as_fairseq(x: Tensor) -> Tensor:
    """(B, T, ...) as a view of fairseq's (time, batch, channel), with its gradient."""
    T_first = x.detach().transpose(0, 1).flatten(2).contiguous()
    return T_first.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)


def as_slice(x: Tensor) -> Tensor:
    """A slice of one wide projection, as q is of a joint projection for q, k and v."""
    wide = x.new_full((*x.shape[:-1], 3 * x.shape[-1] + 1), torch.nan)
    middle = wide[..., x.shape[-1] : 2 * x.shape[-1]]
    return middle.copy_(x.detach())


def heads_first(x: Tensor) -> Tensor:
    """A view of a (batch, heads, time, dim) tensor."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2)


def turned(x: Tensor) -> Tensor:
    """Only for what may have any strides: the last dimension is not contiguous."""
    return x.detach().transpose(2, -1).contiguous().transpose(2, -1)


def same_for_all_rows(x: Tensor) -> Tensor:
    return x.detach()[:1].expand(x.shape)


def same_for_all_heads(x: Tensor) -> Tensor:
    """Of a sequence; of a state, the same for all keys."""
    return x.detach()[:, :, :1].expand(x.shape)


def constant(x: Tensor) -> Tensor:
    """All strides but the last are 0. `.sum().backward()` sends such a gradient, with a last one of 0 too."""
    return x.detach()[(0,) * (x.dim() - 1)].expand(x.shape)


def windows(x: Tensor) -> Tensor:
    """Each row of the batch is the one before, moved on by one number: two dimensions have a stride of 1."""
    signal = torch.cat([x.detach()[0], x.detach()[1:, ..., -1].movedim(0, -1)], -1)
    return signal.unfold(-1, x.shape[-1], 1).movedim(-2, 0)


def one_number(x: Tensor) -> Tensor:
    return x.detach()[(0,) * x.dim()].expand(x.shape)


# Of the inputs, and of the gradients of the outputs.
LAYOUTS = [
    (as_fairseq, turned),
    (as_slice, as_fairseq),
    (heads_first, as_slice),
    (same_for_all_rows, heads_first),
    (same_for_all_heads, windows),
    (constant, one_number),
    (windows, constant),
]


@pytest.mark.parametrize(("layout", "of_gradients"), LAYOUTS, ids=lambda layout: layout.__name__.replace("_", "-"))
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_any_strides(backend, rule, layout, of_gradients):
    drawn = rule.inputs(T=70, K=5, V=3)
    inputs = {name: None if x is None else layout(x) for name, x in drawn.items()}
    assert not any(inputs[name].is_contiguous() for name in "qkv")
    inputs = {n: None if x is None else x.requires_grad_() for n, x in inputs.items()}
    assert_agrees(rule, backend, inputs, lay=of_gradients)


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_last_dimension_of_one_is_contiguous_whatever_its_stride(backend, rule):
    inputs = rule.inputs(T=9, K=1, V=1)
    for name in "qkv":
        strided = inputs[name].new_empty(2, 9, 2, 4)[..., ::4].copy_(inputs[name].detach())
        assert strided.stride(-1) == 4
        inputs[name] = strided.requires_grad_()
    assert_agrees(rule, backend, inputs)


# Nothing to do


@pytest.mark.parametrize(
    ("rule", "sizes", "dtype"),
    deal(RULES, [(0, 5), (2, 0), (0, 0), (0, 100)], [torch.float32, torch.bfloat16, torch.float64]),
    ids=label,
)
def test_empty_batches_and_sequences(backend, rule, sizes, dtype):
    B, T = sizes
    for initial_state in (True, False):
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


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_an_empty_output_can_be_differentiated(backend, rule):
    """In each input alone, as any other output; gates are float32, to mix dtypes."""
    drawn = rule.inputs(T=0, dtype=torch.bfloat16, extras_dtype=torch.float32)
    for name in (n for n, x in drawn.items() if x is not None):
        inputs = detached(drawn, but=name)
        out, _ = rule.run(inputs, backend)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        grad = inputs[name].grad
        assert grad.shape == inputs[name].shape and grad.dtype == inputs[name].dtype and not grad.any(), name


# Autograd and its company


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_only_what_needs_a_gradient_gets_one(backend, rule):
    """And it is the same gradient as when everything needs one."""
    everything = rule.inputs(T=70, dtype=torch.float64)
    expected = outcome(rule, backend, everything)
    for name in (n for n, x in everything.items() if x is not None):
        actual = outcome(rule, backend, detached(everything, but=name))
        names = ["out", "final_state", f"gradient of {name}"]
        # q has no part in the final state alone, but in both together every input has one.
        assert list(actual) == names
        assert_close(actual, {n: expected[n] for n in names}, TOLERANCE[torch.float64])


@pytest.mark.parametrize("rule", RULES, ids=label)
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

    names = list(inputs)
    for reentrant in (True, False):
        leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in inputs.items()}
        recomputed = checkpoint(
            lambda *x: rule.run(dict(zip(names, x, strict=True)), backend), *leaves.values(), use_reentrant=reentrant
        )
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


@pytest.mark.parametrize("T", [0, 1, 70])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_the_two_states_are_no_one_memory(backend, rule, T):
    inputs = rule.inputs(T=T)
    before = inputs["initial_state"].detach().clone()
    rule.run(inputs, backend)[1].detach().fill_(7.0)
    assert torch.equal(inputs["initial_state"], before)


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_second_derivatives_are_refused(backend, rule):
    """Not silently wrong: the backward pass is not made of operations that autograd has seen."""
    inputs = rule.inputs(T=5)
    out, _ = rule.run(inputs, backend)
    for name in ("q", "k", "v"):
        (grad,) = torch.autograd.grad(out.square().sum(), inputs[name], create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.sum().backward()


@pytest.mark.parametrize(("rule", "dtype"), IN_EITHER_PRECISION, ids=label)
def test_autocast_does_not_reach_inside(backend, rule, dtype):
    assert_autocast_does_not_reach_inside(rule, backend, dtype)


# Memory

SMALLEST_CHUNK = 16


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in tensors_in(item)]
    return []


def kept_for_backward(run) -> tuple[tuple[Tensor, Tensor], int]:
    """What `run` returns, and the bytes that its graph keeps alive, each storage counted once.

    Both what is saved through autograd and what a Function's context carries as an attribute.
    """
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = run()
    nodes, seen = [x.grad_fn for x in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            for x in tensors_in(getattr(node, "__dict__", {})):
                keep(x)
    return outputs, sum(kept.values())


@pytest.mark.parametrize(("rule", "dtype"), IN_EITHER_PRECISION, ids=label)
def test_training_keeps_a_state_per_chunk_and_not_per_step(backend, rule, dtype):
    B, T, H, K, V = 1, 1024, 2, 32, 32
    inputs = rule.inputs(B=B, T=T, H=H, K=K, V=V, dtype=dtype)
    outputs, kept = kept_for_backward(lambda: rule.run(inputs, backend))

    def size(tensors):
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    state_per_step = 4 * B * H * T * K * V
    allowed = size(inputs.values()) + size(outputs) + state_per_step // SMALLEST_CHUNK
    assert kept <= allowed + 4096, f"{kept / allowed:.2f} of what is allowed"
    assert allowed < state_per_step / 3  # the claim is worth something at these sizes


def test_that_measure_sees_a_state_per_step(backend):
    """The reference, which keeps every state, is caught by it."""
    inputs = RULE["delta"].inputs(B=1, T=64, H=1, K=32, V=32)
    _, kept = kept_for_backward(lambda: RULE["delta"].run(inputs, "reference"))
    assert kept >= 64 * 32 * 32 * 4


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest storage that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for x in tensors_in(result):
            self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_no_tensor_holds_a_state_per_step_even_for_a_moment(backend, rule):
    """In the forward pass or the backward pass."""
    B, T, H, K, V = 1, 1024, 2, 64, 64
    inputs = rule.inputs(B=B, T=T, H=H, K=K, V=V)
    with LargestTensor() as largest:
        outcome(rule, backend, inputs)
    assert largest.elements <= B * H * T * K * V / 4
