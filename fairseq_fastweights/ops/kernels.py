"""The compiled kernels (`cpu/`, `cuda/`) as torch operators, and the arguments that they are given for a rule.

Three parts: the operators of `torch.ops.fairseq_fastweights`, with shapes and derivatives; `Kernel`, which turns the
gates of a rule into the operators' arguments; `Divided`, for key and value dimensions that one call does not take.

The kernels keep, for the backward pass, the inputs and a state every `interval` steps; it computes those in between
again. Every result has the same bits on every run. On a CPU the number of threads changes none of them either, but
where there are fewer heads than threads: these share a head's value columns, and gradients that sum over columns (those
of q, k, write strengths and gates but those of values) are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights.ops import libraries
from fairseq_fastweights.ops.backends import DTYPES, EXTENSIONS, LARGEST_DIM
from fairseq_fastweights.ops.checks import BackendUnavailable, check_devices, state_dtype, values_are_checked
from fairseq_fastweights.ops.reference import decay_at_starts, one_minus_gate, ungrouped

NAMESPACE = "fairseq_fastweights"
INTERVALS = {"cpu": (64,), "cuda": (64, 128, 256)}
"""By type of device, the steps that may lie between the states that are kept for the backward pass."""
SCAN_INTERVAL = 32
"""The steps that lie between the states that the selective scan keeps for the backward pass."""

_library = torch.library.Library(NAMESPACE, "DEF")

_RULE = (
    "Tensor q, Tensor k, Tensor v, Tensor? erase, bool corrects, Tensor? beta, Tensor? log_gate, bool complement,"
    " Tensor? log_key_decay, Tensor? log_value_decay, Tensor? starts"
)
_SCAN = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D"
_FEATURES = "int map, int nu, int normalization, float eps, float scale"
"""`map` and `normalization` are places in `elementwise.MAPS` and `elementwise.NORMALIZATIONS`."""
_RANDOM = "float source_scale, float log_epsilon, bool stabilized, int normalization, float eps"
_GATE = "Tensor x, Tensor? bias, Tensor? log_rate, Tensor? y, Tensor? weight"
_ACTIVATION = "int activation, int norm, float eps, float scale"
"""`activation` and `norm` are places in `elementwise.ACTIVATIONS` and `elementwise.NORMS`."""
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
rule_step_ = torch.ops.fairseq_fastweights.rule_step_.default


def differentiable_once(backward: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
    """Makes the `backward` of a `torch.autograd.Function` of one that also takes the tensors that `ctx` has saved.

    If it is differentiated in turn, that is an error. torch's `once_differentiable` does not see that gradients depend
    on what was saved, and `torch.autograd.grad`, asked for those of certain tensors, goes around its error: the second
    derivatives that it gives lack a part. So all that gradients depend on has to be saved.
    """

    @wraps(backward)
    def once(ctx: Any, *d_outs: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx, saved, *d_outs)
        if not torch.is_grad_enabled():
            return gradients
        found = [x for x in gradients if x is not None]
        refuse: Callable[..., Any] = _Refusing.apply
        refusing = iter(refuse(len(found), *found, *d_outs, *saved))
        return tuple(None if x is None else next(refusing) for x in gradients)

    return once


class _Refusing(torch.autograd.Function):
    """The first `count` tensors, as depending on the others too."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> Any:
        return tuple(x.view_as(x) for x in tensors[:count] if x is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("this operation cannot be differentiated twice; backend='reference' can")


def cuda_plan(
    operation: str,
    sizes: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    gated: bool = False,
    separate_decays: int = 0,
) -> dict[str, int] | None:
    """How the CUDA kernels would divide the work of a call; None where they go step by step.

    The environment variable ``FASTWEIGHTS_CUDA_ALGORITHM`` ("chunked", "recurrent") asks for either, and
    ``FASTWEIGHTS_CUDA_PLAN`` (as in "columns=64 stages=2 segments=4") for some of these numbers.

    Args:
        operation: "diagonal_forward", "diagonal_backward", "delta_forward" or "delta_backward".
        sizes: batch, time, heads, key_dim, value_dim, and steps between kept states.
        dtype: of q, k and v.
        capability: the GPU's compute capability, major and minor.
        gated: whether there is a log gate.
        separate_decays: 1 with decays of keys or an erase key, 2 with decays of values, 0 with neither.

    Returns:
        Of the launch that carries states from chunk to chunk "columns": values of a block; "blocks" to a head;
        "stages": chunks whose inputs there is room for; "threads" of a block, without those that only copy; "segments"
        of the time side by side, as suits the current device, whatever `capability` is; "shared": bytes of a block's
        memory.

    Raises:
        BackendUnavailable: if there are no CUDA kernels.
        RuntimeError: if there is no such operation, or numbers are out of range.
    """
    if (reason := libraries.load("cuda")) is not None:
        raise BackendUnavailable(reason)
    major, minor = capability
    given = (operation, sizes, dtype, gated, separate_decays)
    numbers = torch.ops.fairseq_fastweights.cuda_plan(*given, 10 * major + minor)
    names = ("columns", "blocks", "stages", "threads", "segments", "shared")
    return dict(zip(names, numbers, strict=True)) if numbers else None


class Arguments(NamedTuple):
    """The arguments of the rules' operators between v and `starts`: the parts of the one recurrence.

    S_t = S' + k_t (beta_t (w_t v_t - S'^T e_t))^T, S' = (f_t z_t^T) * S_{t-1}; a part that is None is left out.

    Attributes:
        erase: e, (batch, time, heads, key_dim); None for k, if the rule corrects.
        corrects: whether the rule takes out what it retrieves, or only adds.
        beta: (batch, time, heads).
        log_gate: log f, (batch, time, heads).
        complement: whether w = 1 - f, for a log_gate, or else 1.
        log_key_decay: log f, (batch, time, heads, key_dim), where there is no log_gate.
        log_value_decay: log z, (batch, time, heads, value_dim), where there is no log_gate.
    """

    erase: Tensor | None = None
    corrects: bool = False
    beta: Tensor | None = None
    log_gate: Tensor | None = None
    complement: bool = False
    log_key_decay: Tensor | None = None
    log_value_decay: Tensor | None = None


@dataclass(frozen=True)
class Kernel:
    """A rule by what the operators make of it.

    Attributes:
        arguments: makes of the rule's gates what the operators take.
        why_not_these: says why the kernels do not take some of the rule's gates, or returns None for those that they
            do take; None if they take all.
        checked: whether the operators get the rule's inputs as they are, so that they refuse all that the rule does.
    """

    arguments: Callable[..., Arguments]
    why_not_these: Callable[..., str | None] | None = None
    checked: bool = False

    def sequence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *gates: Tensor | None,
        initial_state: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Every step: `out` and the final state."""
        keeps = _differentiated(q, k, v, *gates, initial_state)
        if v.shape[1] == 1 and not keeps:
            state = _state_of_its_own(k, v, initial_state)
            return self.step_(q, k, v, *gates, state=state, starts=starts), state
        out, final_state, _ = rule_forward(
            *self.given(q, k, v, gates, starts), _last_contiguous(initial_state), _interval(k, v) if keeps else 0
        )
        return out, final_state

    def step_(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *gates: Tensor | None,
        state: Tensor,
        starts: Tensor | None = None,
    ) -> Tensor:
        """One step, on a state that is changed where it lies, as `can_change` says that it can: `out`."""
        out = rule_step_(*self.given(q, k, v, gates, starts), state)
        mark_changed(state)
        return out

    def given(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor | None], starts: Tensor | None = None
    ) -> tuple[Any, ...]:
        """The operators' arguments for the rule, up to the initial state."""
        given = self.arguments(*gates)
        if given.log_key_decay is not None and given.log_key_decay.dim() == 3:
            # One for each head beside decays of values: there the operators take one for each key.
            each = given.log_key_decay[..., None].expand(*v.shape[:3], k.shape[3])
            given = given._replace(log_key_decay=each)
        if given.beta is not None and not given.corrects:
            k = (ungrouped(k, v) * given.beta[..., None]).to(k.dtype)
            given = given._replace(beta=None)
        if _is_cuda(v.device.type):
            # Kernels for these know of neither: heads are repeated, starts are decays; beside an erase key, of keys.
            q, k = ungrouped(q, v), ungrouped(k, v)
            if starts is not None:
                k, given, starts = (*_starts_as_decays(k, v, given, starts), None)
            if given.erase is not None:
                given = given._replace(erase=ungrouped(given.erase, v))
                if given.log_gate is not None:
                    decay = given.log_gate[..., None].expand(*k.shape)
                    given = given._replace(log_gate=None, log_key_decay=decay)
        erase, corrects, beta, log_gate, complement, f, z = given
        q, k, v, erase = _last_contiguous(q), _last_contiguous(k), _last_contiguous(v), _last_contiguous(erase)
        f, z = _last_contiguous(f), _last_contiguous(z)
        return q, k, v, erase, corrects, beta, log_gate, complement, f, z, starts


def _is_cuda(device_type: str) -> bool:
    return EXTENSIONS.get(device_type) == "cuda"


def _starts_as_decays(k: Tensor, v: Tensor, given: Arguments, starts: Tensor) -> tuple[Tensor, Arguments]:
    if given.complement:
        assert given.log_gate is not None
        write = one_minus_gate(given.log_gate.to(state_dtype(v.dtype)))
        k, given = (k * write[..., None]).to(k.dtype), given._replace(complement=False)
    if given.log_gate is not None or (given.log_key_decay is None and given.log_value_decay is None):
        log_gate = None if given.log_gate is None else given.log_gate[..., None]
        return k, given._replace(log_gate=decay_at_starts(starts, log_gate, v)[..., 0])
    log_key_decay = decay_at_starts(starts, given.log_key_decay, v).expand(*k.shape)
    return k, given._replace(log_key_decay=log_key_decay)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every step of the selective scan: `out` and the final state."""
    keeps = _differentiated(u, delta, A, B, C, D, initial_state)
    if u.shape[1] == 1 and not keeps:
        state = (
            u.new_zeros(u.shape[0], *A.shape, dtype=state_dtype(u.dtype)) if initial_state is None else initial_state
        )
        state = state.clone(memory_format=torch.contiguous_format)
        return selective_scan_step_(u, delta, A, B, C, D, state=state), state
    u, delta, B, C = (_last_contiguous(x) for x in (u, delta, B, C))
    out, final_state, _ = selective_scan_forward(u, delta, A, B, C, D, initial_state, SCAN_INTERVAL if keeps else 0)
    return out, final_state


def selective_scan_step_(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *, state: Tensor
) -> Tensor:
    """One step of it, on a state that is changed where it lies, as `can_change` says that it can: `out`."""
    u, delta, B, C = (_last_contiguous(x) for x in (u, delta, B, C))
    out = torch.ops.fairseq_fastweights.selective_scan_step_(u, delta, A, B, C, D, state)
    mark_changed(state)
    return out


def mark_changed(state: Tensor) -> None:
    """Tells autograd, as torch's own in-place operations do: a graph that saved the state refuses what it became.

    Of compiled code, torch's functionalization tells it.
    """
    if not torch.compiler.is_dynamo_compiling():
        torch.autograd.graph.increment_version(state)


def can_change(state: Tensor) -> bool:
    """True if the steps take a state that lies in memory like this: its rows contiguous."""
    return state.is_contiguous() or state.shape[-1] <= 1 or state.stride(-1) == 1


def one_gate(log_gate: Tensor) -> Arguments:
    """The arguments for one gate of old and new."""
    return Arguments(log_gate=log_gate, complement=True)


def decays(log_key_decay: Tensor | None, log_value_decay: Tensor | None = None, **others: Any) -> Arguments:
    """The arguments for decays of keys and values: one decay that all keys share is the cheaper log_gate.

    An expanded one is not where it is differentiated: each key's share of the gradient is asked for.
    """
    if log_key_decay is not None and log_value_decay is None:
        if log_key_decay.dim() == 3:
            return Arguments(log_gate=log_key_decay, **others)
        if log_key_decay.stride(-1) == 0 and not _differentiated(log_key_decay):
            return Arguments(log_gate=log_key_decay[..., 0], **others)
    return Arguments(log_key_decay=log_key_decay, log_value_decay=log_value_decay, **others)


def correction(beta: Tensor, log_gate: Tensor | None = None) -> Arguments:
    """The arguments for a correction, behind a decay if there is one."""
    return decays(log_gate, corrects=True, beta=beta)


def every_part(
    erase: Tensor | None, beta: Tensor | None, log_key_decay: Tensor | None, log_value_decay: Tensor | None
) -> Arguments:
    """The arguments for all parts of the recurrence."""
    return decays(log_key_decay, log_value_decay, erase=erase, corrects=erase is not None, beta=beta)


def why_not_every_part(
    erase: Tensor | None, beta: Tensor | None, log_key_decay: Tensor | None, log_value_decay: Tensor | None
) -> str | None:
    """Why the kernels do not take these parts together; None if they do."""
    if erase is not None and log_value_decay is not None:
        return "no kernel takes decays of values together with an erase key"
    return None


def _differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _last_contiguous(x: Any) -> Any:
    """`x`, or a copy whose last dimension is contiguous, as the kernels need it.

    What `torch.empty_like` makes of it has to be so too. Of overlapping windows, where another dimension has a stride
    of 1, it may be the other one: these are copied.
    """
    # Asking first spares a step, which takes microseconds, the closer looks.
    if x is None or x.is_contiguous() or x.shape[-1] <= 1:
        return x
    *others, last = x.stride()
    overlaps = any(n > 1 and stride == 1 for n, stride in zip(x.shape[:-1], others, strict=True))
    return x.contiguous() if overlaps or last != 1 else x


def _state_of_its_own(k: Tensor, v: Tensor, initial_state: Tensor | None) -> Tensor:
    if initial_state is not None:
        return initial_state.clone(memory_format=torch.contiguous_format)
    return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=state_dtype(v.dtype))


def _interval(k: Tensor, v: Tensor) -> int:
    """Steps between the states that are kept for the backward pass, one of `INTERVALS`.

    The fewest for which a state every so many steps takes less than a quarter of the bytes of inputs, outputs and their
    gradients, or else the most. Those between are computed again; on a CPU they stay in a core's cache meanwhile, where
    64 do better: an eighth, at K = V = 64 in float32.
    """
    *fewer, most = INTERVALS[v.device.type]
    state = k.shape[-1] * v.shape[-1] * (8 if v.dtype == torch.float64 else 4)
    step = 4 * (k.shape[-1] + v.shape[-1]) * v.element_size()
    return next((steps for steps in fewer if 4 * state < steps * step), most)


KEYS, VALUES = 2, 3
"""The dimensions of a state, (batch, heads, key_dim, value_dim), that a call can be divided over."""
_MULTIPLE = 16
"""Parts begin at multiples of this, where rows of any dtype are aligned as those of the whole are."""

Inputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Divided:
    """A kernel for key and value dimensions beyond `LARGEST_DIM`: a call divided into several.

    The columns of a state, one for each value, are independent in every rule: any call can be divided over values. Its
    rows, one for each key, are independent in the rules that only add (sum, gated, decay), where y_t = S_t q_t is the
    sum of the parts' outputs. In rules that correct they are not, as v_t - S_{t-1} k_t sums over all rows: calls are
    divided over values only, and larger keys are refused.

    Parts are views: kernels read inputs, and change the state of a step, in place; the initial state of a part of a
    sequence is copied. In 16 bits there is more rounding: each part's `out` comes in the dtype of `v`, and so does its
    gradient of inputs that parts share (parts of values: q, k, log key decays, gates, beta; parts of keys: v, log value
    decays, gates). With two parts the rounding error of such a result grows from 0.17% to 0.25% in bfloat16, from 0.02%
    to 0.03% in float16. With more parts the error of `out` stays, as it is summed in the dtype of states; that of the
    gradients, which autograd sums in their own dtype, grows: 0.42% for nine parts in bfloat16.

    Attributes:
        kernel: that of a part.
        dims: the dimensions of a state, of `KEYS` and `VALUES`, that calls are divided over, the outer first.
        along: of each input which of these its last dimension is; None for gates that have a number for each head.
    """

    kernel: Kernel
    dims: tuple[int, ...]
    along: tuple[int | None, ...]

    def sequence(
        self, *inputs: Tensor | None, initial_state: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes what `Kernel.sequence` does on parts along the first of `dims`, each on parts along the others."""
        if not self.dims:
            return self.kernel.sequence(*cast(Any, inputs), initial_state=initial_state, starts=starts)
        (dim, *_), inner = self.dims, replace(self, dims=self.dims[1:])
        parts = [
            inner.sequence(*part, initial_state=state, starts=starts)
            for part, state in self._parts(inputs, initial_state)
        ]
        final_states = [final_state for _, final_state in parts]
        final_state = torch.cat(final_states, dim) if len(parts) > 1 else final_states[0]
        return _whole_out(dim, [out for out, _ in parts]), final_state

    def step_(self, *inputs: Tensor | None, state: Tensor, starts: Tensor | None = None) -> Tensor:
        """Computes what `Kernel.step_` does; each part changes its part of the state."""
        if not self.dims:
            return self.kernel.step_(*cast(Any, inputs), state=state, starts=starts)
        (dim, *_), inner = self.dims, replace(self, dims=self.dims[1:])
        parts = self._parts(inputs, state)
        return _whole_out(dim, [inner.step_(*part, state=of_part, starts=starts) for part, of_part in parts])

    def _parts(self, inputs: Inputs, state: Tensor | None) -> Iterator[tuple[Inputs, Any]]:
        """Inputs and a state in as few parts as the kernels take, and these as even as `_MULTIPLE` lets them.

        `Tensor.split` makes them, as its backward pass is one concatenation; that of slices would add up as many
        tensors of the whole's size, zeros but for a part.
        """
        dim = self.dims[0]
        whole = inputs[self.along.index(dim)]
        assert whole is not None
        size = whole.shape[-1]
        count = _ceil(size, LARGEST_DIM[whole.device.type])
        if count == 1:
            return iter([(inputs, state)])
        part = _MULTIPLE * _ceil(_ceil(size, count), _MULTIPLE)
        pieces = [
            x.split(part, -1) if x is not None and along == dim else (x,) * count
            for x, along in zip(inputs, self.along, strict=True)
        ]
        states = (None,) * count if state is None else state.split(part, dim)
        return zip(zip(*pieces, strict=True), states, strict=True)


def _whole_out(dim: int, parts: list[Tensor]) -> Tensor:
    """The outputs of parts along `dim` as one: those of values side by side, those of keys added up."""
    first, *others = parts
    if not others:
        return first
    if dim == VALUES:
        return torch.cat(parts, -1)
    return sum(others, first.to(state_dtype(first.dtype))).to(first.dtype)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


# Decode steps of whole layers, all but their projections, as one operator each, for CPUs (`cpu/steps/`).
#
# Otherwise a layer's decode step is a dozen operators or more, on few numbers each. In a model the processor's cache no
# longer holds their code when the layer runs again, as all weights have passed through it: to load the code takes
# longer than to read the layer's weights. The result is that of the mixer's separate operators, up to rounding.


def may_take(x: Tensor, backend: str) -> bool:
    """True if the operators take a step of a layer with the input x: on a CPU, and nothing is differentiated.

    Nor do they run under torch.compile, which joins operators by itself, or under autocast.
    """
    return (
        x.is_cpu
        and not torch.is_grad_enabled()
        and backend in ("auto", "native")
        and x.dtype in DTYPES["cpu"]
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and not values_are_checked()
        and libraries.load("cpu") is None
    )


def own(state: Tensor, in_place: bool) -> Tensor:
    """The state that a step may change: itself, or a copy."""
    if not in_place or not state.is_contiguous():
        return state.clone(memory_format=torch.contiguous_format)
    mark_changed(state)
    return state
