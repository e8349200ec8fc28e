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
    RULE,
    RULES,
    RULES_AND_REGIMES,
    Inputs,
    Rule,
    assert_agrees,
    assert_autocast_does_not_reach_inside,
    assert_close,
    cotangents,
    definition,
    differentiate,
    label,
    relative_error,
    state_dtype,
)

TOLERANCE = {
    # What the project promises of every backend, up to T = 4096.
    torch.float32: 1e-5,
    # Half a unit in the last place is 4e-3 in bfloat16, and out and gradients are rounded to it at
    # least once; float16 has three bits more, and no promise of its own.
    torch.bfloat16: 2e-2,
    torch.float16: 2e-2,
    # 1e-16 times the terms of a sum; logs of -1e4 cost four digits of it within a chunk.
    torch.float64: 1e-11,
}

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
    (257, 8, 64),
]

PRINCIPAL = [RULE[name] for name in ("sum", "gated", "decay", "delta")]

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


def named(outputs: tuple[Tensor, Tensor], grads: dict[str, Tensor | None]) -> Inputs:
    return dict(zip(("out", "final_state"), outputs, strict=True)) | {
        f"gradient of {name}": grad for name, grad in grads.items()
    }


def outcome(rule: Rule, backend: str, inputs: Inputs) -> Inputs:
    """Outputs and gradients by name, for the cotangents that `definition` is asked for too."""
    outputs = rule.run(inputs, backend)
    return named(outputs, differentiate(outputs, inputs, cotangents(outputs)))


# Values


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=label)
@pytest.mark.parametrize(("T", "K", "V"), SHAPES)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_shapes(backend, rule, T, K, V, dtype, initial_state):
    inputs = rule.inputs(T=T, K=K, V=V, dtype=dtype, initial_state=initial_state)
    assert_agrees(rule, backend, inputs, TOLERANCE[dtype])


# With no state to start from, outputs are as small as the writes, and what those lack shows.
@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=label)
@pytest.mark.parametrize(("rule", "regime"), RULES_AND_REGIMES, ids=label)
def test_gates_and_write_strengths(backend, rule, regime, dtype, initial_state):
    inputs = rule.inputs(T=150, K=6, V=7, dtype=dtype, regime=regime, initial_state=initial_state)
    assert_agrees(rule, backend, inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("extras", ["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=label)
@pytest.mark.parametrize(("T", "K", "V"), [(31, 5, 3), (150, 16, 32)])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_half_precision(backend, rule, T, K, V, dtype, extras):
    """Gates and write strengths in the inputs' type, or in float32 beside them."""
    extras_dtype = torch.float32 if extras == "float32" else None
    inputs = rule.inputs(T=T, K=K, V=V, dtype=dtype, extras_dtype=extras_dtype)
    assert_agrees(rule, backend, inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_float32_gates_beside_float64(backend, rule):
    # Exact in float64 but for the gradient of those gates, which is rounded to float32: 6e-8.
    inputs = rule.inputs(T=70, dtype=torch.float64, extras_dtype=torch.float32)
    assert_agrees(rule, backend, inputs, 1e-7)


# (rule, regime, dtype): the longest T that is promised. What accumulates does so here.
LONG = [
    ("sum", "ordinary", torch.float32),
    ("gated", "tiny", torch.float32),
    ("decay", "ordinary or tiny", torch.float32),
    ("decay", "tiny", torch.float32),
    ("delta", "ordinary", torch.float32),
    ("gated", "near one", torch.float32),
    ("delta", "one", torch.float32),
    ("delta", "repeated keys", torch.float32),
    ("sum", "ordinary", torch.bfloat16),
    ("decay", "near one", torch.bfloat16),
    ("delta", "ordinary", torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "regime", "dtype"), LONG, ids=label)
def test_4096_steps(backend, name, regime, dtype):
    inputs = RULE[name].inputs(B=1, T=4096, H=2, K=16, V=16, dtype=dtype, regime=regime)
    assert_agrees(RULE[name], backend, inputs, TOLERANCE[dtype])


@pytest.mark.parametrize("use", ["out", "final_state"])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_a_loss_of_one_output_alone(backend, rule, use):
    inputs = rule.inputs(T=70, dtype=torch.float64)
    assert_agrees(rule, backend, inputs, TOLERANCE[torch.float64], use=use)


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_gradients_are_those_of_finite_differences(backend, rule, initial_state):
    inputs = rule.inputs(B=1, T=5, H=2, K=2, V=3, dtype=torch.float64, initial_state=initial_state)
    names = [name for name, x in inputs.items() if x is not None]

    def run(*tensors):
        return rule.run(inputs | dict(zip(names, tensors, strict=True)), backend)

    assert torch.autograd.gradcheck(run, [inputs[name] for name in names], check_forward_ad=False)


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_a_sequence_in_parts_is_the_sequence(backend, rule):
    """Forward and backward, gradients flowing from part to part through the state."""
    inputs = rule.inputs(T=150, dtype=torch.float64)
    outs, state = [], inputs["initial_state"]
    for steps in (slice(0, 1), slice(1, 64), slice(64, 64), slice(64, 133), slice(133, 150)):
        part = {name: None if x is None else x[:, steps] for name, x in inputs.items()}
        out, state = rule.run(part | {"initial_state": state}, backend)
        outs.append(out)
    outputs = torch.cat(outs, 1), state
    weights = cotangents(outputs)
    actual = named(outputs, differentiate(outputs, inputs, weights))
    assert_close(actual, definition(rule, inputs, weights), TOLERANCE[torch.float64])


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_later_steps_do_not_change_earlier_outputs(backend, rule):
    inputs = rule.inputs(T=100, dtype=torch.float64, requires_grad=False)
    other = rule.inputs(T=100, dtype=torch.float64, requires_grad=False, seed=7)
    mixed = {
        name: torch.cat([x[:, :41], other[name][:, 41:]], 1)
        for name, x in inputs.items()
        if x is not None and name != "initial_state"
    }
    mixed = inputs | mixed
    first, second = (rule.run(x, backend)[0] for x in (inputs, mixed))
    assert relative_error(second[:, :41], first[:, :41]) <= TOLERANCE[torch.float64]
    assert relative_error(second[:, 41:], first[:, 41:]) > 0.1


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


def same_for_all_rows(x: Tensor) -> Tensor:
    return x.detach()[:1].expand(x.shape)


def same_for_all_heads(x: Tensor) -> Tensor:
    """Of a sequence; of a state, the same for all keys."""
    return x.detach()[:, :, :1].expand(x.shape)


def constant(x: Tensor) -> Tensor:
    """All strides but the last are 0."""
    return x.detach()[(0,) * (x.dim() - 1)].expand(x.shape)


def windows(x: Tensor) -> Tensor:
    """Each row of the batch is the one before, moved on by one number: two dimensions have a stride of 1."""
    signal = torch.cat([x.detach()[0], x.detach()[1:, ..., -1].movedim(0, -1)], -1)
    return signal.unfold(-1, x.shape[-1], 1).movedim(-2, 0)


LAYOUTS = [as_fairseq, as_slice, heads_first, same_for_all_rows, same_for_all_heads, constant, windows]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__.replace("_", "-"))
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_any_strides(backend, rule, layout):
    drawn = rule.inputs(T=70, K=5, V=3)
    inputs = {name: None if x is None else layout(x) for name, x in drawn.items()}
    assert not any(inputs[name].is_contiguous() for name in "qkv")
    inputs = {n: None if x is None else x.requires_grad_() for n, x in inputs.items()}
    assert_agrees(rule, backend, inputs, TOLERANCE[torch.float32])


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_gradients_reach_what_fairseq_projected(backend, rule):
    """One (time, batch, 3 channels) tensor, cut into q, k and v without a copy."""
    T, B, H, D = 40, 2, 3, 4
    inputs = rule.inputs(B=B, T=T, H=H, K=D, V=D, dtype=torch.float64)
    joint = torch.cat([inputs[n].detach().transpose(0, 1).flatten(2) for n in "qkv"], -1)
    joint.requires_grad_()
    q, k, v = (x.view(T, B, H, D).transpose(0, 1) for x in joint.chunk(3, -1))
    out, state = rule.run(inputs | {"q": q, "k": k, "v": v}, backend)
    weights = cotangents((out, state))
    (grad,) = torch.autograd.grad((out, state), joint, weights)
    expected = definition(rule, inputs, weights)
    for name, part in zip("qkv", grad.chunk(3, -1), strict=True):
        part = part.view(T, B, H, D).transpose(0, 1)
        error = relative_error(part, expected[f"gradient of {name}"])
        assert error <= TOLERANCE[torch.float64], name


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_expanded_cotangents(backend, rule):
    """`.sum().backward()` sends a single number with strides of 0."""
    inputs = rule.inputs(T=70, dtype=torch.float64)
    outputs = rule.run(inputs, backend)
    leaves = {name: x for name, x in inputs.items() if x is not None}
    grads = torch.autograd.grad(outputs[0].sum() + 2 * outputs[1].sum(), list(leaves.values()))
    ones = torch.ones_like(outputs[0]), torch.full_like(outputs[1], 2.0)
    actual = named(outputs, dict(zip(leaves, grads, strict=True)))
    assert_close(actual, definition(rule, inputs, ones), TOLERANCE[torch.float64])


@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_cotangents_in_fairseqs_layout(backend, rule):
    """The output projection's gradient arrives as a transposed view."""
    inputs = rule.inputs(T=70)
    outputs = rule.run(inputs, backend)
    weights = cotangents(outputs)
    turned = as_fairseq(weights[0]), weights[1].transpose(2, 3).contiguous().transpose(2, 3)
    assert not turned[0].is_contiguous() and not turned[1].is_contiguous()
    actual = named(outputs, differentiate(outputs, inputs, turned))
    assert_close(actual, definition(rule, inputs, weights), TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("rule", PRINCIPAL, ids=label)
def test_a_last_dimension_of_one_is_contiguous_whatever_its_stride(backend, rule, name):
    inputs = rule.inputs(T=9, K=1, V=1)
    strided = inputs[name].new_empty(2, 9, 2, 4)[..., ::4].copy_(inputs[name].detach())
    assert strided.stride(-1) == 4
    inputs[name] = strided.requires_grad_()
    assert_agrees(rule, backend, inputs, TOLERANCE[torch.float32])


# Nothing to do


@pytest.mark.parametrize("initial_state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0), (0, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=label)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_empty_batches_and_sequences(backend, rule, dtype, B, T, initial_state):
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
        assert grad is None or grad.shape == inputs[name].shape
        assert grad is None or not grad.any()
    if start is not None:
        assert torch.equal(start.grad, torch.full_like(start, 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=label)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_an_empty_output_can_be_differentiated(backend, rule, dtype):
    """In each input alone, as any other output; gates are float32, to mix dtypes."""
    drawn = rule.inputs(T=0, dtype=dtype, extras_dtype=torch.float32)
    for name in (n for n, x in drawn.items() if x is not None):
        inputs = {n: None if x is None else x.detach().requires_grad_(n == name) for n, x in drawn.items()}
        out, _ = rule.run(inputs, backend)
        assert out.dtype == dtype
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
        inputs = {n: None if x is None else x.detach().requires_grad_(n == name) for n, x in everything.items()}
        actual = outcome(rule, backend, inputs)
        names = ["out", "final_state", f"gradient of {name}"]
        # q has no part in the final state alone, but in both together every input has one.
        assert list(actual) == names
        assert_close(actual, {n: expected[n] for n in names}, TOLERANCE[torch.float64])


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_without_autograd(backend, rule):
    inputs = rule.inputs(T=70)
    expected = rule.run(inputs, backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = rule.run(inputs, backend)
        for x, y in zip(outputs, expected, strict=True):
            assert not x.requires_grad and y.requires_grad
            assert torch.equal(x, y)
    plain = {name: None if x is None else x.detach() for name, x in inputs.items()}
    assert not any(x.requires_grad for x in rule.run(plain, backend))


@pytest.mark.parametrize("T", [0, 1, 70])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_inputs_are_left_alone(backend, rule, T):
    """The caller's tensors keep their values, and the two states are no one memory."""
    inputs = rule.inputs(T=T)
    before = {name: None if x is None else x.detach().clone() for name, x in inputs.items()}
    outputs = rule.run(inputs, backend)
    weights = cotangents(outputs)
    copies = tuple(x.clone() for x in weights)
    sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    outputs[1].detach().fill_(7.0)
    for name, x in before.items():
        assert x is None or torch.equal(inputs[name], x), name
    assert all(torch.equal(x, y) for x, y in zip(weights, copies, strict=True))


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_outputs_belong_to_the_caller(backend, rule):
    """Who overwrites them, as generation does with a state, does not change the gradients."""
    inputs = rule.inputs(T=70)
    expected = outcome(rule, backend, inputs)
    outputs = rule.run(inputs, backend)
    for x in outputs:
        x.detach().fill_(7.0)
    for name, grad in differentiate(outputs, inputs, cotangents(outputs)).items():
        assert torch.equal(grad, expected[f"gradient of {name}"]), name


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_second_derivatives_are_refused(backend, rule):
    """Not silently wrong: the backward pass is not made of operations that autograd has seen."""
    inputs = rule.inputs(T=5)
    out, _ = rule.run(inputs, backend)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


@pytest.mark.parametrize("rule", RULES, ids=label)
def test_same_bits_twice(backend, rule):
    inputs = rule.inputs(T=257, K=33, V=17)
    first, second = (outcome(rule, backend, inputs) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_activation_checkpointing(backend, rule, use_reentrant):
    inputs = rule.inputs(T=70)
    expected = outcome(rule, backend, inputs)
    names = list(inputs)

    def run(*tensors):
        return rule.run(dict(zip(names, tensors, strict=True)), backend)

    outputs = checkpoint(run, *inputs.values(), use_reentrant=use_reentrant)
    # backward(), as the reentrant kind does not work with torch.autograd.grad.
    torch.autograd.backward(outputs, cotangents(outputs))
    grads = {name: x.grad for name, x in inputs.items() if x is not None}
    for name, x in named(outputs, grads).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("rule", RULES, ids=label)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("rule", RULES, ids=label)
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
