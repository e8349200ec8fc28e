"""The compiled kernels as torch operators, `torch.ops.fairseq_fastweights`: schemas, shapes and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import check_devices, state_dtype

NAMESPACE = "fairseq_fastweights"
_library = torch.library.Library(NAMESPACE, "DEF")

_RULE = (
    "Tensor q, Tensor k, Tensor v, Tensor? erase, bool corrects, Tensor? beta, Tensor? log_gate, bool complement,"
    " Tensor? log_key_decay, Tensor? log_value_decay, Tensor? starts"
)
_SCAN = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D"
_FEATURES = "int map, int nu, int normalization, float eps, float scale"
"""`map` and `normalization` are places in `features.MAPS` and `features.NORMALIZATIONS`."""
_RANDOM = "float source_scale, float log_epsilon, bool stabilized, int normalization, float eps"
_GATE = "Tensor x, Tensor? bias, Tensor? log_rate, Tensor? y, Tensor? weight"
_ACTIVATION = "int activation, int norm, float eps, float scale"
"""`activation` and `norm` are places in `gating.ACTIVATIONS` and `gating.NORMS`."""
_CONVOLUTION = "Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? lengths, Tensor? starts"
DPFP = 3
"""The place of "dpfp", the only map that changes a vector's size."""
_SCHEMAS = (
    f"rule_forward({_RULE}, Tensor? initial_state, int interval) -> (Tensor out, Tensor final_state, Tensor states)",
    f"rule_backward(Tensor d_out, Tensor? d_final_state, {_RULE}, Tensor? initial_state, Tensor states, int interval)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_erase, Tensor d_beta, Tensor d_log_gate, Tensor d_log_key_decay,"
    " Tensor d_log_value_decay, Tensor d_initial_state)",
    f"rule_step_({_RULE}, Tensor(a!) state) -> Tensor out",
    f"selective_scan_forward({_SCAN}, Tensor? initial_state, int interval)"
    " -> (Tensor out, Tensor final_state, Tensor states)",
    f"selective_scan_backward(Tensor d_out, Tensor? d_final_state, {_SCAN}, Tensor? initial_state, Tensor states,"
    " int interval)"
    " -> (Tensor du, Tensor d_delta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor d_initial_state)",
    f"selective_scan_step_({_SCAN}, Tensor(a!) state) -> Tensor out",
    f"map_features(Tensor x, {_FEATURES}, ScalarType dtype) -> Tensor",
    f"map_features_backward(Tensor d_out, Tensor x, {_FEATURES}) -> Tensor",
    f"random_features(Tensor x, Tensor source, {_RANDOM}, ScalarType dtype) -> Tensor",
    f"random_features_backward(Tensor d_out, Tensor x, Tensor source, {_RANDOM}) -> (Tensor dx, Tensor d_source)",
    f"gate({_GATE}, {_ACTIVATION}, ScalarType dtype) -> Tensor",
    f"gate_backward(Tensor d_out, {_GATE}, {_ACTIVATION})"
    " -> (Tensor dx, Tensor d_bias, Tensor d_log_rate, Tensor dy, Tensor d_weight)",
    f"short_convolution({_CONVOLUTION}) -> (Tensor y, Tensor last)",
    f"short_convolution_backward(Tensor d_y, Tensor? d_last, {_CONVOLUTION})"
    " -> (Tensor dx, Tensor dw, Tensor db, Tensor d_before)",
    "delta_step_(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor weight, Tensor bias, float eps, Tensor(a!) state)"
    " -> Tensor out",
    "window_step_(Tensor q, Tensor k, Tensor v, Tensor? cosines, Tensor? sines, Tensor seen, Tensor weight,"
    " Tensor bias, Tensor log_factor, bool sums, float eps, Tensor? starts, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor(c!) state)"
    " -> Tensor out",
    "gated_delta_step_(Tensor x, Tensor beta, Tensor decay, Tensor gate, Tensor conv, Tensor rate, Tensor bias,"
    " Tensor norm, int q_heads, int k_heads, int v_heads, float most, float eps, Tensor(a!) before, Tensor(b!) memory)"
    " -> Tensor out",
    "cpu_instruction_set() -> str",
    "cuda_plan(str operation, int[] sizes, ScalarType dtype, bool gated, int separate_decays, int capability) -> int[]",
)
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _shapes_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the shapes of an operator's results, for tensors without memory.

    torch calls it too where one of several tensors is on meta: what it made of the others would be unwritten memory.
    """
    names = [argument.name for argument in getattr(torch.ops.fairseq_fastweights, name).default._schema.arguments]

    def register(shapes: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*inputs: Any) -> Any:
            given = {of: x for of, x in zip(names, inputs, strict=True) if isinstance(x, Tensor)}
            check_devices(given, *next(iter(given.items())))
            return shapes(*inputs)

        return torch.library.register_fake(f"{NAMESPACE}::{name}", checked, lib=_library)

    return register


def _shape_of_forward(k: Tensor, v: Tensor, interval: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, heads, key_dim = *v.shape[:3], k.shape[3]
    kept = (time + interval - 1) // interval - 1 if interval else 0
    dtype = state_dtype(v.dtype)
    return (
        torch.empty_like(v),
        v.new_empty(batch, heads, key_dim, v.shape[-1], dtype=dtype),
        v.new_empty(batch, heads, kept, key_dim, v.shape[-1], dtype=dtype),
    )


def _shape_of_gradient(x: Tensor | None, v: Tensor) -> Tensor:
    return v.new_empty(0) if x is None else torch.empty_like(x)


def _shape_of_state_gradient(k: Tensor, v: Tensor, initial_state: Tensor | None) -> Tensor:
    shape = (0,) if initial_state is None else (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    return v.new_empty(shape, dtype=state_dtype(v.dtype))


@_shapes_of("rule_forward")
def _(q: Any, k: Any, v: Any, *others: Any) -> Any:
    return _shape_of_forward(k, v, others[-1])


@_shapes_of("rule_backward")
def _(d_out: Any, d_final_state: Any, *given: Any) -> Any:
    q, k, v, erase, _, beta, log_gate, _, f, z, _, initial_state, _, _ = given
    gradients = [_shape_of_gradient(x, v) for x in (q, k, v, erase, beta, log_gate, f, z)]
    return (*gradients, _shape_of_state_gradient(k, v, initial_state))


@_shapes_of("rule_step_")
def _(q: Any, k: Any, v: Any, *others: Any) -> Any:
    return torch.empty_like(v)


@_shapes_of("selective_scan_forward")
def _(u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, initial_state: Any, interval: int) -> Any:
    batch, time, channels = u.shape
    kept = (time + interval - 1) // interval - 1 if interval else 0
    dtype = state_dtype(u.dtype)
    return (
        torch.empty_like(u),
        u.new_empty(batch, *A.shape, dtype=dtype),
        u.new_empty(batch, kept, A.shape[1], channels, dtype=dtype),
    )


@_shapes_of("selective_scan_backward")
def _(
    d_out: Any,
    d_final_state: Any,
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    initial_state: Any,
    states: Any,
    interval: int,
) -> Any:
    gradients = [_shape_of_gradient(x, u) for x in (u, delta, A, B, C, D)]
    shape = (0,) if initial_state is None else (u.shape[0], *A.shape)
    return (*gradients, u.new_empty(shape, dtype=state_dtype(u.dtype)))


@_shapes_of("selective_scan_step_")
def _(u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, state: Any) -> Any:
    return torch.empty_like(u)


@_shapes_of("map_features")
def _(x: Any, feature_map: int, nu: int, normalization: int, eps: float, scale: float, dtype: torch.dtype) -> Any:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * (2 * nu if feature_map == DPFP else 1), dtype=dtype)


@_shapes_of("map_features_backward")
def _(d_out: Any, x: Any, *how: Any) -> Any:
    return torch.empty_like(x)


@_shapes_of("random_features")
def _(x: Any, source: Any, *how: Any) -> Any:
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1], dtype=how[-1])


@_shapes_of("random_features_backward")
def _(d_out: Any, x: Any, source: Any, *how: Any) -> Any:
    return torch.empty_like(x), torch.empty_like(source)


@_shapes_of("gate")
def _(x: Any, *others: Any) -> Any:
    return x.new_empty(x.shape, dtype=others[-1])


@_shapes_of("gate_backward")
def _(d_out: Any, x: Any, bias: Any, log_rate: Any, y: Any, weight: Any, *how: Any) -> Any:
    return tuple(_shape_of_gradient(of, x) for of in (x, bias, log_rate, y, weight))


@_shapes_of("short_convolution")
def _(x: Any, weight: Any, *others: Any) -> Any:
    _, batch, channels = x.shape
    return x.new_empty(x.shape), x.new_empty(batch, weight.shape[1] - 1, channels, dtype=state_dtype(x.dtype))


@_shapes_of("short_convolution_backward")
def _(d_y: Any, d_last: Any, x: Any, weight: Any, bias: Any, before: Any, *others: Any) -> Any:
    return tuple(_shape_of_gradient(of, x) for of in (x, weight, bias, before))


@_shapes_of("delta_step_")
def _(q: Any, k: Any, v: Any, beta: Any, weight: Any, *others: Any) -> Any:
    return v.new_empty(len(v), 1, len(weight), v.shape[-1])


@_shapes_of("window_step_")
def _(q: Any, *others: Any) -> Any:
    return q.new_empty(q.shape)


@_shapes_of("gated_delta_step_")
def _(x: Any, beta: Any, decay: Any, gate: Any, *others: Any) -> Any:
    return x.new_empty(gate.shape)


def _keep_rule(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.interval = inputs
    ctx.corrects, ctx.complement = tensors.pop(4), tensors.pop(6)
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _differentiate_rule(ctx: Any, d_out: Any, d_final_state: Any, d_states: Any) -> Any:
    q, k, v, erase, beta, log_gate, f, z, starts, initial_state, states = ctx.saved_tensors
    given = (q, k, v, erase, ctx.corrects, beta, log_gate, ctx.complement, f, z, starts, initial_state)
    gradients = _backwards(
        _rule_backward,
        torch.zeros_like(v) if d_out is None else d_out,
        d_final_state,
        *given,
        states,
        ctx.interval,
    )
    # What is absent has an empty tensor for a gradient.
    of = (q, k, v, erase, beta, log_gate, f, z, initial_state)
    dq, dk, dv, d_erase, d_beta, d_gate, df, dz, d_initial = (
        None if x is None else gradient for x, gradient in zip(of, gradients, strict=True)
    )
    return dq, dk, dv, d_erase, None, d_beta, d_gate, None, df, dz, None, d_initial, None


def _keep_scan(ctx: Any, inputs: Any, output: Any) -> None:
    *given, ctx.interval = inputs
    ctx.save_for_backward(*given, output[2])
    ctx.set_materialize_grads(False)


def _differentiate_scan(ctx: Any, d_out: Any, d_final_state: Any, d_states: Any) -> Any:
    u, delta, A, B, C, D, initial_state, states = ctx.saved_tensors
    *gradients, dD, d_initial = _backwards(
        _scan_backward,
        torch.zeros_like(u) if d_out is None else d_out,
        d_final_state,
        u,
        delta,
        A,
        B,
        C,
        D,
        initial_state,
        states,
        ctx.interval,
    )
    return *gradients, None if D is None else dD, None if initial_state is None else d_initial, None


def _keep_features(ctx: Any, inputs: Any, output: Any) -> None:
    x, *ctx.how, _ = inputs
    ctx.save_for_backward(x)


def _differentiate_features(ctx: Any, d_out: Any) -> Any:
    [x] = ctx.saved_tensors
    gradient = _backwards(_features_backward, d_out, x, *ctx.how)
    return gradient, *[None] * (len(ctx.how) + 1)


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _refuse_second_derivatives(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError("a compiled operation cannot be differentiated twice; backend='reference' can")


def _below_autograd(operator: Any, *inputs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*inputs)


def _backwards(operator: Any, *inputs: Any) -> Any:
    """Calls an operator of a backward pass, without asking autograd unless that is differentiated too."""
    return operator(*inputs) if torch.is_grad_enabled() else _below_autograd(operator, *inputs)


def _register_autograd(name: str, differentiate: Callable[..., Any], keep: Callable[..., None]) -> Callable[..., Any]:
    """Does what `torch.library.register_autograd` does, for an operator whose arguments have no names and no defaults.

    torch's reads the operator's schema at each call, which is half of the time that a small forward pass takes.

    Returns:
        a function that does what the operator does, but where nothing is traced comes to its kernel, or to autograd,
        without torch's dispatcher, which would call autograd's part in Python and be called by that again.
    """
    operator = getattr(torch.ops.fairseq_fastweights, name).default

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = _below_autograd(operator, *inputs)
            keep(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return differentiate(ctx, *gradients)

    def call(*inputs: Any, apply: Callable[..., Any] = Differentiated.apply) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return apply(*inputs)
        return _below_autograd(operator, *inputs)

    # Without what Function.apply looks for of functorch in every argument.
    apply_directly = super(torch.autograd.Function, Differentiated).apply

    def call_directly(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return operator(*inputs)
        return call(*inputs, apply=apply_directly)

    _library.impl(name, call, "Autograd")
    return call_directly


def register_autograd(
    name: str, differentiable: int, tensors: int, definition: Callable[..., Any]
) -> Callable[..., Any]:
    """The derivatives of an operator that takes `tensors` tensors, of which the first `differentiable` have gradients.

    Its backward operator takes the gradients of what it returns and the same arguments, but for a dtype. Where the
    backward pass is to be differentiated too, it is that of `definition`, PyTorch's own operators on these arguments.

    Returns:
        a function that does what the operator does, in less time where nothing is traced.
    """
    backward = getattr(torch.ops.fairseq_fastweights, f"{name}_backward").default

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.how = inputs[tensors:]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *d_outs: Any) -> Any:
        given = ctx.saved_tensors
        how = [value for value in ctx.how if not isinstance(value, torch.dtype)]
        rest = [None] * (tensors - differentiable + len(ctx.how))
        if all(d_out is None for d_out in d_outs):
            return *[None] * differentiable, *rest
        if torch.is_grad_enabled():
            return *_gradients_of(definition, given[:differentiable], (*given, *ctx.how), d_outs), *rest
        first, *others = d_outs
        first = torch.zeros_like(given[0]) if first is None else first
        gradients = _below_autograd(backward, first, *others, *given, *how)
        # What is absent has an empty tensor for a gradient.
        return *(None if x is None else gradient for x, gradient in zip(given, gradients, strict=False)), *rest

    _register_autograd(f"{name}_backward", _refuse_second_derivatives, _keep_nothing)
    return _register_autograd(name, differentiate, keep)


def _gradients_of(definition: Callable[..., Any], of: Any, inputs: Any, d_outs: Any) -> list[Tensor | None]:
    outputs = definition(*inputs)
    pairs = zip(outputs if isinstance(outputs, tuple) else (outputs,), d_outs, strict=True)
    # Of what is returned, a part may depend on no input that wants a gradient.
    differentiated = [(y, d_y) for y, d_y in pairs if d_y is not None and y.requires_grad]
    if not differentiated:
        return [None for _ in of]
    results, weights = zip(*differentiated, strict=True)
    wanted = [x for x in of if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, weights, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in of]


# Looked up once, by names that a call would take long to find.
_rule_backward = torch.ops.fairseq_fastweights.rule_backward.default
_scan_backward = torch.ops.fairseq_fastweights.selective_scan_backward.default
_features_backward = torch.ops.fairseq_fastweights.map_features_backward.default
rule_forward = _register_autograd("rule_forward", _differentiate_rule, _keep_rule)
selective_scan_forward = _register_autograd("selective_scan_forward", _differentiate_scan, _keep_scan)
map_features = _register_autograd("map_features", _differentiate_features, _keep_features)
for _operator in ("rule_backward", "selective_scan_backward", "map_features_backward"):
    _register_autograd(_operator, _refuse_second_derivatives, _keep_nothing)
# Nothing differentiates these. Looked up once, as by its name each takes as long as a tenth of a step.
delta_step_ = torch.ops.fairseq_fastweights.delta_step_.default
window_step_ = torch.ops.fairseq_fastweights.window_step_.default
gated_delta_step_ = torch.ops.fairseq_fastweights.gated_delta_step_.default
