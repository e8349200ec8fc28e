"""The compiled kernels (`cpu/`, `cuda/`) as torch operators, and the arguments that they are given for a rule.

Two parts: the operators of `torch.ops.fairseq_fastweights`, with shapes and derivatives; and `Kernel`, which turns the
gates of a rule into the operators' arguments, and divides calls of larger dimensions than one call takes.

The kernels keep, for the backward pass, the inputs and a state every `interval` steps; it computes those in between
again. Every result has the same bits on every run. On a CPU the number of threads changes none of them either, but
where there are fewer heads than threads: these share a head's value columns, and gradients that sum over columns (those
of q, k, beta and gates, but not of gates for each value) are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights.ops import backends, checks, libraries
from fairseq_fastweights.ops.backends import AUTOMATIC, DTYPES, EXTENSIONS, LARGEST_DIM, choose_backend, why_not
from fairseq_fastweights.ops.checks import BackendUnavailable, check_devices, state_dtype
from fairseq_fastweights.ops.reference import Row, decay_at_starts, one_minus_gate, ungrouped

NAMESPACE = "fairseq_fastweights"
INTERVALS = {"cpu": (64,), "cuda": (64, 128, 256)}
"""By type of device, the steps that may lie between the states that are kept for the backward pass."""

_library = torch.library.Library(NAMESPACE, "DEF")

# The arguments of one rule; `Parts` has those between v and starts.
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
    # interval: steps between two kept states, 0 to keep none.
    f"rule_forward({_RULE}, Tensor? initial_state, int interval) -> (Tensor out, Tensor final_state, Tensor states)",
    f"rule_backward(Tensor d_out, Tensor? d_final_state, {_RULE}, Tensor? initial_state, Tensor states, int interval)"
    " -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_erase, Tensor d_beta, Tensor d_log_gate, Tensor d_log_key_decay,"
    " Tensor d_log_value_decay, Tensor d_initial_state)",
    f"rule_step_({_RULE}, Tensor(a!) state) -> Tensor out",
    f"selective_scan_forward({_SCAN}, Tensor? initial_state, int interval)"
    " -> (Tensor out, Tensor final_state, Tensor states)",
    f"selective_scan_backward(Tensor d_out, Tensor? d_final_state, {_SCAN}, Tensor? initial_state, Tensor states,"
    " int interval)"
    " -> (Tensor d_u, Tensor d_delta, Tensor d_A, Tensor d_B, Tensor d_C, Tensor d_D, Tensor d_initial_state)",
    f"selective_scan_step_({_SCAN}, Tensor(a!) state) -> Tensor out",
    f"map_features(Tensor x, {_FEATURES}, ScalarType dtype) -> Tensor",
    f"map_features_backward(Tensor d_out, Tensor x, {_FEATURES}) -> Tensor d_x",
    f"random_features(Tensor x, Tensor source, {_RANDOM}, ScalarType dtype) -> Tensor",
    f"random_features_backward(Tensor d_out, Tensor x, Tensor source, {_RANDOM}) -> (Tensor d_x, Tensor d_source)",
    f"gate({_GATE}, {_ACTIVATION}, ScalarType dtype) -> Tensor",
    f"gate_backward(Tensor d_out, {_GATE}, {_ACTIVATION})"
    " -> (Tensor d_x, Tensor d_bias, Tensor d_log_rate, Tensor d_y, Tensor d_weight)",
    f"short_convolution({_CONVOLUTION}) -> (Tensor y, Tensor last)",
    f"short_convolution_backward(Tensor d_y, Tensor? d_last, {_CONVOLUTION})"
    " -> (Tensor d_x, Tensor d_weight, Tensor d_bias, Tensor d_before)",
    # Whole decode steps, for CPUs: feature map, rule and state at once.
    "delta_step_(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor weight, Tensor bias, float eps, Tensor(a!) state)"
    " -> Tensor out",
    "window_step_(Tensor q, Tensor k, Tensor v, Tensor? cosines, Tensor? sines, Tensor seen, Tensor weight,"
    " Tensor bias, Tensor log_factor, bool sums, float eps, Tensor? starts, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor(c!) state)"
    " -> Tensor out",
    "gated_delta_step_(Tensor x, Tensor beta, Tensor decay, Tensor gate, Tensor conv, Tensor rate, Tensor bias,"
    " Tensor norm, int q_heads, int k_heads, int v_heads, float max_beta, float eps, Tensor(a!) before,"
    " Tensor(b!) state)"
    " -> Tensor out",
    "cpu_instruction_set() -> str",
    "cuda_plan(str operation, int[] sizes, ScalarType dtype, bool gated, int separate_decays, int capability) -> int[]",
)
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _operator(name: str) -> Any:
    return getattr(torch.ops.fairseq_fastweights, name).default


def _shapes_of(operator: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the shapes of an operator's results: a function of its arguments by name.

    torch calls it too where only one of several tensors is on meta: the result would be unwritten memory.
    """
    names = [argument.name for argument in _operator(operator)._schema.arguments]

    def register(shapes: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*inputs: Any) -> Any:
            given = dict(zip(names, inputs, strict=True))
            tensors = {of: x for of, x in given.items() if isinstance(x, Tensor)}
            check_devices(tensors, *next(iter(tensors.items())))
            return shapes(**given)

        return torch.library.register_fake(f"{NAMESPACE}::{operator}", checked, lib=_library)

    return register


def _gradients(like: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Results of a backward pass; the gradient of an input that is None is empty."""
    return tuple(like.new_empty(0) if x is None else torch.empty_like(x) for x in inputs)


def _gradient_of_state(like: Tensor, initial_state: Tensor | None) -> Tensor:
    return like.new_empty((0,) if initial_state is None else initial_state.shape, dtype=state_dtype(like.dtype))


def _kept(time: int, interval: int) -> int:
    """How many states are kept for the backward pass; an interval of 0 keeps none."""
    return (time + interval - 1) // interval - 1 if interval else 0


@_shapes_of("rule_forward")
def _(k: Tensor, v: Tensor, interval: int, **_: Any) -> Any:
    # states: (batch, heads, kept, key_dim, value_dim).
    batch, time, heads, value_dim = v.shape
    states = v.new_empty(batch, heads, _kept(time, interval), k.shape[3], value_dim, dtype=state_dtype(v.dtype))
    return torch.empty_like(v), states.new_empty(batch, heads, k.shape[3], value_dim), states


@_shapes_of("rule_backward")
def _(v: Tensor, initial_state: Tensor | None, **given: Any) -> Any:
    names = ("q", "k", "v", "erase", "beta", "log_gate", "log_key_decay", "log_value_decay")
    given["v"] = v
    return *_gradients(v, *(given[name] for name in names)), _gradient_of_state(v, initial_state)


@_shapes_of("selective_scan_forward")
def _(u: Tensor, A: Tensor, interval: int, **_: Any) -> Any:
    batch, time, channels = u.shape
    # (batch, kept, state, channels): channels last, along which the kernels are vectorised.
    states = u.new_empty(batch, _kept(time, interval), A.shape[1], channels, dtype=state_dtype(u.dtype))
    return torch.empty_like(u), states.new_empty(batch, *A.shape), states


@_shapes_of("selective_scan_backward")
def _(u: Tensor, initial_state: Tensor | None, **given: Any) -> Any:
    gradients = _gradients(u, u, *(given[name] for name in ("delta", "A", "B", "C", "D")))
    return *gradients, _gradient_of_state(u, initial_state)


@_shapes_of("map_features")
def _(x: Tensor, map: int, nu: int, dtype: torch.dtype, **_: Any) -> Any:
    return x.new_empty(*x.shape[:-1], x.shape[-1] * (2 * nu if map == DPFP else 1), dtype=dtype)


@_shapes_of("short_convolution")
def _(x: Tensor, weight: Tensor, **_: Any) -> Any:
    last = x.new_empty(x.shape[1], weight.shape[1] - 1, x.shape[2], dtype=state_dtype(x.dtype))
    return x.new_empty(x.shape), last


_shapes_of("rule_step_")(lambda v, **_: torch.empty_like(v))
_shapes_of("selective_scan_step_")(lambda u, **_: torch.empty_like(u))
_shapes_of("random_features")(lambda x, dtype, **_: x.new_empty(*x.shape[:-1], 2 * x.shape[-1], dtype=dtype))
_shapes_of("gate")(lambda x, dtype, **_: x.new_empty(x.shape, dtype=dtype))
_shapes_of("map_features_backward")(lambda x, **_: torch.empty_like(x))
_shapes_of("random_features_backward")(lambda x, source, **_: _gradients(x, x, source))
_shapes_of("gate_backward")(lambda x, bias, log_rate, y, weight, **_: _gradients(x, x, bias, log_rate, y, weight))
_shapes_of("short_convolution_backward")(lambda x, weight, bias, before, **_: _gradients(x, x, weight, bias, before))
# Decode steps of layers: (batch, 1, heads, value_dim), the shape of q, and that of the output gate.
_shapes_of("delta_step_")(lambda v, weight, **_: v.new_empty(len(v), 1, len(weight), v.shape[-1]))
_shapes_of("window_step_")(lambda q, **_: q.new_empty(q.shape))
_shapes_of("gated_delta_step_")(lambda x, gate, **_: x.new_empty(gate.shape))


class _BackwardPass(torch.autograd.Function):
    """An operator of a backward pass, which cannot be differentiated in turn."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("a compiled operation cannot be differentiated twice; backend='reference' can")


def differentiable(name: str, definition: Callable[..., Any] | None = None, like: int = 0) -> Callable[..., Any]:
    """The derivatives of an operator, by the operator of its backward pass.

    That one takes the gradients of the results (the first always) and the operator's arguments but for a dtype; before
    the last of these, the states, where they are a third result. Its results `d_<argument>` are the gradients.

    It does what `torch.library.register_autograd` does, whose way through Python takes half of the time of a small
    forward pass: the schema is read once here, and at each call there.

    Args:
        name: of the operator.
        definition: PyTorch's own operators on the same arguments, for derivatives of the backward pass; None for none.
        like: the argument that the first result is shaped like.

    Returns:
        a function that does what the operator does. Where nothing is traced it comes to the kernel, or to autograd,
        without torch's dispatcher, which would call autograd's part in Python and be called by that again.
    """
    backwards = f"{name.removesuffix('_forward')}_backward"
    operator, backward_operator = _operator(name), _operator(backwards)
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments]
    settings = [place for place, argument in enumerate(arguments) if "Tensor" not in str(argument.type)]
    wanted = [names.index(result.name.removeprefix("d_")) for result in backward_operator._schema.returns]
    keeps_states = len(operator._schema.returns) == 3

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                results = operator(*inputs)
            # Tensors go where autograd watches them for changes in place, all else to ctx.
            tensors: list[Any] = list(inputs)
            ctx.settings = []
            for place in settings:
                ctx.settings.append(tensors[place])
                tensors[place] = None
            if keeps_states:
                tensors.append(results[2])
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, *d_results: Any) -> Any:
            inputs = list(ctx.saved_tensors)
            states = [inputs.pop()] if keeps_states else []
            # The arguments as the operator got them.
            for place, setting in zip(settings, ctx.settings, strict=True):
                inputs[place] = setting
            gradients: list[Any] = [None] * len(inputs)
            if all(d_result is None for d_result in d_results):
                return tuple(gradients)
            if definition is not None and torch.is_grad_enabled():
                _differentiate(definition, inputs, wanted, d_results, gradients)
                return tuple(gradients)
            first, *others = d_results[:2] if keeps_states else d_results
            first = torch.zeros_like(inputs[like]) if first is None else first
            given = [x for x in inputs if not isinstance(x, torch.dtype)]
            # The order of the arguments of every `*_backward` operator.
            given = [first, *others, *given[:-1], *states, given[-1]]
            if torch.is_grad_enabled():  # by torch's dispatcher, to `_BackwardPass`
                found = backward_operator(*given)
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    found = backward_operator(*given)
            for place, gradient in zip(wanted, found if isinstance(found, tuple) else (found,), strict=True):
                if inputs[place] is not None:  # the gradient of an input that is None is an empty tensor
                    gradients[place] = gradient
            return tuple(gradients)

    # The same without the search of every argument for what functorch has wrapped.
    apply_directly: Any = super(torch.autograd.Function, Differentiated).apply

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return operator(*inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return apply_directly(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    # The way through torch's dispatcher: compiled code, functorch, and callers of torch.ops.
    def dispatched(forwards: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
                return apply(*inputs)
            with torch._C._AutoDispatchBelowAutograd():
                return forwards(*inputs)

        return run

    _library.impl(name, dispatched(operator, Differentiated.apply), "Autograd")
    refused = partial(_BackwardPass.apply, backward_operator)
    _library.impl(backwards, dispatched(backward_operator, refused), "Autograd")
    return call


def _differentiate(
    definition: Callable[..., Any], inputs: list[Any], wanted: list[int], d_results: Any, gradients: list[Any]
) -> None:
    """Fills in the gradients of a definition, which can be differentiated in turn."""
    results = definition(*inputs)
    pairs = zip(results if isinstance(results, tuple) else (results,), d_results, strict=True)
    # A result may depend on no input that requires a gradient.
    used = [(y, d_y) for y, d_y in pairs if d_y is not None and y.requires_grad]
    places = [place for place in wanted if inputs[place] is not None and inputs[place].requires_grad]
    if not used or not places:
        return
    results, weights = zip(*used, strict=True)
    of = [inputs[place] for place in places]
    found = torch.autograd.grad(results, of, weights, create_graph=True, allow_unused=True)
    for place, gradient in zip(places, found, strict=True):
        gradients[place] = gradient


# Looked up once: by its name an operator takes as long to find as a tenth of a decode step.
rule_forward = differentiable("rule_forward", like=2)
selective_scan_forward = differentiable("selective_scan_forward")
map_features = differentiable("map_features")
rule_step_ = _operator("rule_step_")
selective_scan_step_ = _operator("selective_scan_step_")
delta_step_ = _operator("delta_step_")
window_step_ = _operator("window_step_")
gated_delta_step_ = _operator("gated_delta_step_")


def differentiable_once(backward: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
    """Makes the `backward` of a `torch.autograd.Function` of one that also takes the tensors that `ctx` has saved.

    If it is differentiated in turn, that is an error. torch's `once_differentiable` does not see that gradients depend
    on what was saved, and `torch.autograd.grad`, asked for those of certain tensors, goes around its error: the second
    derivatives lack a part. So all that gradients depend on has to be saved.
    """

    @wraps(backward)
    def once(ctx: Any, *d_outs: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx, saved, *d_outs)
        # Only a backward pass that is recorded (create_graph=True) has to refuse its own.
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


KEYS, VALUES = 2, 3
"""The dimensions of a state, (batch, heads, key_dim, value_dim), that a call can be divided over."""
_MULTIPLE = 16
"""Parts begin at multiples of this, where rows of any dtype are aligned as those of the whole are."""

Inputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Kernel:
    """A rule, computed by the operators: in one call, or in several for dimensions beyond `LARGEST_DIM`.

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
        row: makes the recurrence's arguments of the rule's gates.
        dims: the dimensions of a state, of `KEYS` and `VALUES`, that calls are divided over, the outer first.
        along: of each input which of these its last dimension is; None for gates that have a number for each head.
    """

    row: Callable[..., Row]
    dims: tuple[int, ...] = ()
    along: tuple[int | None, ...] = ()

    def sequence(
        self, *inputs: Tensor | None, initial_state: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Every step, for q, k, v and the gates: `out` and the final state."""
        if self.dims:
            # One dimension here, the others inside of each part.
            (dim, *_), inner = self.dims, replace(self, dims=self.dims[1:])
            parts = [
                inner.sequence(*part, initial_state=state, starts=starts)
                for part, state in self._parts(inputs, initial_state)
            ]
            final_states = [final_state for _, final_state in parts]
            final_state = torch.cat(final_states, dim) if len(parts) > 1 else final_states[0]
            return _whole_out(dim, [out for out, _ in parts]), final_state
        q, k, v, *gates = cast(Any, inputs)
        keeps_states = differentiated(*inputs, initial_state)
        # A single step has an operator of its own, which takes the state and changes it.
        if v.shape[1] == 1 and not keeps_states:
            state = first_state(initial_state, v, (v.shape[0], v.shape[2], k.shape[3], v.shape[3]))
            return self.step_(*inputs, state=state, starts=starts), state
        arguments = operator_arguments(q, k, v, self.row(*gates), starts)
        if initial_state is not None:
            initial_state = last_contiguous(initial_state)
        out, final_state, _ = rule_forward(*arguments, initial_state, _interval(k, v) if keeps_states else 0)
        return out, final_state

    def step_(self, *inputs: Tensor | None, state: Tensor, starts: Tensor | None = None) -> Tensor:
        """One step, on a state that is changed in place, where `can_change` allows it: `out`."""
        if self.dims:  # each part changes its part of the state
            (dim, *_), inner = self.dims, replace(self, dims=self.dims[1:])
            parts = self._parts(inputs, state)
            return _whole_out(dim, [inner.step_(*part, state=of_part, starts=starts) for part, of_part in parts])
        q, k, v, *gates = cast(Any, inputs)
        out: Tensor = rule_step_(*operator_arguments(q, k, v, self.row(*gates), starts), state)
        mark_changed(state)
        return out

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
        # Parts of equal size up to the multiple; the last one has the rest.
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
    # Columns are independent; over rows, y = S q is a sum.
    if dim == VALUES:
        return torch.cat(parts, -1)
    return sum(others, first.to(state_dtype(first.dtype))).to(first.dtype)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def operator_arguments(q: Tensor, k: Tensor, v: Tensor, row: Row, starts: Tensor | None = None) -> tuple[Any, ...]:
    """The arguments of the rules' operators up to the initial state."""
    erase, corrects, beta, complement, f, z = row
    # Kernels take a decay of a whole head, log_gate, beside no other: it is cheaper than one for each key.
    log_gate = None
    if f is not None and z is None:
        if f.dim() == 3:
            log_gate, f = f, None
        # An expanded decay that is differentiated stays: its gradient has a number for each key.
        elif f.stride(-1) == 0 and not differentiated(f):
            log_gate, f = f[..., 0], None
    elif f is not None and f.dim() == 3:
        f = f[..., None].expand(*v.shape[:3], k.shape[3])
    # beta v k^T, without a correction: the factor goes into the key.
    if beta is not None and not corrects:
        k, beta = (ungrouped(k, v) * beta[..., None]).to(k.dtype), None
    # CPU kernels take grouped heads and document starts as they are. CUDA kernels take neither: the heads are expanded,
    # and a start becomes a decay to 0.
    if EXTENSIONS.get(v.device.type) == "cuda":
        q, k = ungrouped(q, v), ungrouped(k, v)
        if starts is not None:
            # (1 - f) v k^T: the factor goes into the key, as the decay is about to change.
            if complement:
                assert log_gate is not None
                k = (k * one_minus_gate(log_gate.to(state_dtype(v.dtype)))[..., None]).to(k.dtype)
                complement = False
            if log_gate is not None or (f is None and z is None):
                log_gate = decay_at_starts(starts, None if log_gate is None else log_gate[..., None], v)[..., 0]
            else:
                f = decay_at_starts(starts, f, v).expand(*k.shape)
            starts = None
        if erase is not None:  # it has as many heads as k, and beside it they take decays of keys
            erase = ungrouped(erase, v)
            if log_gate is not None:
                f, log_gate = log_gate[..., None].expand(*k.shape), None
    # Kernels read vectors of the last dimension; all other strides are free.
    tensors = [q, k, v, erase, f, z]
    for place, x in enumerate(tensors):
        if x is not None and not x.is_contiguous():
            tensors[place] = last_contiguous(x)
    q, k, v, erase, f, z = tensors  # type: ignore[assignment]
    return q, k, v, erase, corrects, beta, log_gate, complement, f, z, starts


def first_state(initial_state: Tensor | None, v: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """A state of its own for a first step: a copy of the initial one, or zeros for inputs like `v`."""
    if initial_state is None:
        return v.new_zeros(sizes, dtype=state_dtype(v.dtype))
    return initial_state.clone(memory_format=torch.contiguous_format)


def mark_changed(state: Tensor) -> None:
    """Tells autograd of a change in place: a graph that saved the state then refuses its backward pass.

    In compiled code torch's functionalization does it.
    """
    if not torch.compiler.is_dynamo_compiling():
        torch.autograd.graph.increment_version(state)


def can_change(state: Tensor) -> bool:
    """True if the steps can change a state of these strides: its rows are contiguous."""
    return state.is_contiguous() or state.shape[-1] <= 1 or state.stride(-1) == 1


def differentiated(*tensors: Tensor | None) -> bool:
    """True if a gradient of one of them is wanted."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def last_contiguous(x: Tensor) -> Tensor:
    """`x`, or a copy whose last dimension is contiguous, as the kernels need it.

    `torch.empty_like` of the result has to be so too. Of overlapping windows, where another dimension has a stride of
    1, it may not be: these are copied.
    """
    if x.is_contiguous() or x.shape[-1] <= 1:  # asked first: strides take longer to get
        return x
    *strides, last = x.stride()
    if last != 1:
        return x.contiguous()
    for n, stride in zip(x.shape, strides, strict=False):
        if n > 1 and stride == 1:
            return x.contiguous()
    return x


def _interval(k: Tensor, v: Tensor) -> int:
    """Steps between the states that are kept for the backward pass, one of `INTERVALS`.

    The fewest for which a state every so many steps takes less than a quarter of the bytes of inputs, outputs and their
    gradients, or else the most. Those between are computed again; on a CPU they stay in a core's cache meanwhile, where
    64 do better: an eighth, at K = V = 64 in float32.
    """
    *fewer, most = INTERVALS[v.device.type]
    if fewer:
        state = k.shape[-1] * v.shape[-1] * (8 if v.dtype == torch.float64 else 4)
        step = 4 * (k.shape[-1] + v.shape[-1]) * v.element_size()
        for steps in fewer:
            if 4 * state < steps * step:
                return steps
    return most


# Decode steps of whole layers, all but their projections, as one operator each, for CPUs (`cpu/steps/`).
#
# Otherwise a layer's decode step is a dozen operators or more, on few numbers each. In a model the processor's cache no
# longer holds their code when the layer runs again, as all weights have passed through it: to load the code takes
# longer than to read the layer's weights. The result is that of the mixer's separate operators, up to rounding.


def takes(backend: str, x: Tensor, when_compiling: bool = False) -> bool:
    """True if an operation that is not along time runs in a kernel; the answer is kept in `backends.chosen`.

    "auto" takes PyTorch's operators for forward-mode derivatives, which kernels lack, and, unless `when_compiling`,
    under torch.compile, which fuses them with those before and after.

    Raises:
        BackendUnavailable: if kernels are asked for and there are none.
    """
    compiling = torch.compiler.is_compiling()
    if backend in AUTOMATIC and ((compiling and not when_compiling) or forward_ad._current_level >= 0):
        return False
    key = str(backend), x.device.type, x.dtype  # a list has no hash; `choose_backend` refuses it by name
    taken: bool | None = None if compiling else backends.chosen.get(key)
    if taken is None:
        taken = choose_backend(backend, 1, why_not(x.device.type, x.dtype), in_chunks=False) == "native"
        if not compiling:
            backends.chosen[key] = taken
    return taken


def takes_step(backend: str, x: Tensor) -> bool:
    """True if the operators take a layer's decode step with the input x: on a CPU, and nothing is differentiated.

    Nor do they run under torch.compile, which fuses operators by itself, or under autocast.
    """
    return (
        x.is_cpu
        and not torch.is_grad_enabled()
        and backend in (*AUTOMATIC, "native")
        and x.dtype in DTYPES["cpu"]
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and not checks.values_checked
        and libraries.load("cpu") is None
    )


def own_state(state: Tensor, in_place: bool) -> Tensor:
    """The state that a decode step may change: the same one, or a copy."""
    if not in_place or not state.is_contiguous():
        return state.clone(memory_format=torch.contiguous_format)
    mark_changed(state)
    return state
