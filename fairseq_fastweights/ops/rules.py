"""The update rules: a record each, and the public functions.

All else that depends on a rule follows from its record: checks of arguments, the backend that "auto" takes, the
division of a call that is too large for the kernels, the list of `python -m fairseq_fastweights.env`; the layers, the
models' options and their help, tables of the documentation, cases of the benchmark and of the tests. A rule of one's
own needs no more than a reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights.ops import backends, checks, chunkwise, fla, reference
from fairseq_fastweights.ops.backends import choose_backend, say_backend
from fairseq_fastweights.ops.checks import (
    BackendUnavailable,
    Gate,
    check_devices,
    check_in_place,
    check_inputs,
    check_state,
    state_dtype,
    without_autocast,
)
from fairseq_fastweights.ops.kernels import KEYS, VALUES, Kernel, can_change
from fairseq_fastweights.ops.reference import Row, run_row

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Function = TypeVar("_Function", bound=Callable[..., Any])
Implementation = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Rule:
    """An update rule, with all its implementations: called with q, k, v and its gates in order.

    Attributes:
        name: of the rule.
        gates: its inputs beside q, k and v, in order.
        reference: the definition, one step at a time: (q, k, v, *gates, initial_state=...) -> (out, final_state).
        chunkwise: the same, parallel in time, in PyTorch; None if there is no such form.
        kernel: the same, compiled; None if there is none.
        corrects: whether a write depends on the state. If so, the rows of a state, one for each key, depend on one
            another: calls cannot be divided over keys (over the columns, one for each value, they always can). And a
            layer's normaliser of attention normalisation is not one more column of the state, but a sum of its own
            (Schlag et al. 2021, Eq. 26), with the rule's decays of keys.
        takes_starts: whether its implementations take `starts`, and q and k of fewer heads than v.
        ordered: whether the result depends on the order of the pairs of keys and values. An encoder's source has none.
        equation: the state after a step, S being that before it, (value_dim, key_dim).
        help: its line in `--help`.
        source: model and paper that it is from.
        feature_map: that of the paper's layers; None for a rule that `mixers.FastWeightAttention` does not have.
        normalization: those of the paper's layers.
        inputs: the names of q, k, v and the gates, in order.
        operator_checks: whether the operator of a decode step checks the shapes and dtypes of all inputs.
        why_not_gates: says why no kernel takes some gates together, or returns None; None if kernels take all.

    Examples:
        >>> def last_value(q, k, v, *, initial_state=None):  # S_t = v_t k_t^T, y_t = S_t q_t
        ...     state = k[:, -1, :, :, None] * v[:, -1, :, None, :]
        ...     return (q * k).sum(-1, keepdim=True) * v, state
        >>> rule = Rule("last value", (), last_value)
        >>> out, state = rule(torch.ones(1, 5, 2, 4), torch.ones(1, 5, 2, 4), torch.ones(1, 5, 2, 3))
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 3]), torch.Size([1, 2, 4, 3]))
    """

    name: str
    gates: tuple[Gate, ...]
    reference: Implementation
    chunkwise: Implementation | None = None
    kernel: Kernel | None = None
    corrects: bool = False
    takes_starts: bool = False
    ordered: bool = True
    equation: str = ""
    help: str = ""
    source: str = ""
    feature_map: str | None = None
    normalization: frozenset[str] = frozenset()
    why_not_gates: Callable[..., str | None] | None = None
    operator_checks: bool = False

    inputs: tuple[str, ...] = field(init=False, repr=False)

    # Made once: a decode step hands it to its checks.
    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", ("q", "k", "v", *(gate.name for gate in self.gates)))

    def __call__(
        self,
        *inputs: Tensor | None,
        initial_state: Tensor | None = None,
        starts: Tensor | None = None,
        in_place: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor]:
        """Runs it on q, k, v and the gates; shapes, options, results and errors are those of `ops.sum_rule`.

        Raises:
            TypeError: for more or fewer tensors than that, None for a gate that is optional counted.
        """
        if len(inputs) != 3 + len(self.gates):
            raise TypeError(f"the {self.name} rule was given {len(inputs)} inputs; it must be {', '.join(self.inputs)}")
        if in_place and self.operator_checks and backend in (*backends.AUTOMATIC, "native"):
            try:
                if self._kernel_checks(inputs, initial_state, starts):
                    backends.refuse_tangents(initial_state, *inputs)
                    state = check_in_place(initial_state, self.inputs, inputs, starts)
                    return self.kernel.step_(*inputs, state=state, starts=starts), state  # type: ignore[union-attr]
            except Exception:
                self._check(inputs, initial_state, starts)  # names the argument at fault, if it is one
                raise
        self._check(inputs, initial_state, starts)
        if in_place:
            check_in_place(initial_state, self.inputs, inputs, starts)
        return self._run(inputs, initial_state, starts, in_place, backend)

    def for_layer(
        self,
        *inputs: Tensor | None,
        initial_state: Tensor | None = None,
        starts: Tensor | None = None,
        in_place: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor]:
        """Runs it on tensors that a layer has made, which need no checks; the state, which a user may give, does.

        Without a state there is none to write into: the final state is then a new tensor, also with `in_place`.
        """
        in_place = in_place and initial_state is not None
        if checks.values_checked:
            self._check(inputs, initial_state, starts)
        elif initial_state is not None:
            # A state comes from the user, all else from the layer itself.
            _, k, v, *_ = cast(Any, inputs)
            shape = v.shape[0], v.shape[2], k.shape[3], v.shape[3]
            check_state(initial_state, shape, "(batch, heads, key_dim, value_dim)", v.dtype)
            if initial_state.device != v.device:
                check_devices({"initial_state": initial_state}, "v", v)
            if in_place and not initial_state.is_contiguous():
                check_in_place(initial_state, (), ())
        return self._run(inputs, initial_state, starts, in_place, backend)

    def best_backend(self, device_type: str, dtype: torch.dtype, time: int, key_dim: int) -> str:
        """The backend that "auto" takes."""
        return choose_backend(
            "auto", time, self.why_not_native(device_type, dtype, key_dim), self.chunkwise is not None
        )

    def why_not_native(self, device_type: str, dtype: torch.dtype, key_dim: int) -> str | None:
        """Why no kernel takes such inputs; None if one does."""
        if self.kernel is None:
            return f"the {self.name} rule has no compiled kernel"
        reason = backends.why_not(device_type, dtype)
        if reason is None and self.corrects and not backends.fits(device_type, key_dim):
            largest = backends.LARGEST_DIM[device_type]
            return (
                f"the {device_type} kernels take the {self.name} rule with key dimensions of up to {largest}, not "
                f"{key_dim}"
            )
        return reason

    def _check(self, inputs: tuple[Any, ...], initial_state: Tensor | None, starts: Tensor | None) -> None:
        q, k, v, *gates = inputs
        check_inputs(q, k, v, initial_state, self.gates, gates, starts)
        # A rule of one's own need not know these.
        if not self.takes_starts and (starts is not None or k.shape[2] != v.shape[2]):
            given = "starts" if starts is not None else f"k of {k.shape[2]} heads for v of {v.shape[2]}"
            raise ValueError(
                f"the {self.name} rule was given {given}; it takes neither starts nor fewer heads of q and k"
            )

    def _kernel_checks(self, inputs: tuple[Any, ...], state: Any, starts: Tensor | None) -> bool:
        """True for a decode step that the kernel checks itself, before it changes the state; `_check` takes as long.

        It does not check devices, strides, and that q is shaped as k: that is done here.
        """
        q, k, v, *gates = inputs
        if state is None or not v.is_cpu or v.shape[1] != 1 or q.shape != k.shape or v.dim() != 4:
            return False
        if checks.values_checked or torch.compiler.is_compiling() or not can_change(state):
            return False
        for x in (q, k, state, *gates):
            if not x.is_cpu:
                return False
        for x in (q, k, v):
            if not x.is_contiguous() and x.stride(-1) not in (0, 1):
                return False
        if starts is not None and not starts.is_cpu:
            return False
        return "cpu" not in backends.LARGEST_DIM and backends.why_not("cpu", v.dtype) is None

    def _run(
        self, inputs: tuple[Any, ...], initial_state: Any, starts: Tensor | None, in_place: bool, backend: str
    ) -> tuple[Tensor, Tensor]:
        """Runs it on inputs that were checked."""
        _, k, v, *gates = inputs
        batch, time, heads, value_dim = v.shape
        refused = None if self.why_not_gates is None else self.why_not_gates(*gates)
        key_dim = k.shape[3]
        # The choice is kept, as it takes as long as the kernel of a decode step.
        call = v.device.type, v.dtype, key_dim, value_dim, time > 1, refused
        key = self, str(backend), call  # another backend than a name has no hash, and is refused
        run = None if torch.compiler.is_compiling() else backends.chosen.get(key)
        if run is None:
            run = self._choose(backend, *call)
            if not torch.compiler.is_compiling():
                backends.chosen[key] = run
        kernel = run if isinstance(run, Kernel) else None
        if kernel is not None and forward_ad._current_level >= 0:
            backends.refuse_tangents(initial_state, *inputs)
        # Nothing to compute, but an empty output has gradients as any other.
        if time == 0:
            if in_place:
                return torch.zeros_like(v), initial_state
            return no_steps(v, (batch, heads, key_dim, value_dim), initial_state, inputs)
        # A rule of one's own may know no `starts`.
        options = {} if starts is None else {"starts": starts}
        if in_place and kernel is not None and time == 1 and can_change(initial_state):
            return kernel.step_(*inputs, state=initial_state, **options), initial_state
        sequence: Any = run if kernel is None else kernel.sequence
        out, final_state = sequence(*inputs, initial_state=initial_state, **options)
        return out, initial_state.copy_(final_state) if in_place else final_state

    def _choose(
        self,
        backend: str,
        device_type: str,
        dtype: torch.dtype,
        key_dim: int,
        value_dim: int,
        in_chunks: bool,
        refused: str | None,
    ) -> Kernel | Implementation:
        """The implementation of a call, of several steps if `in_chunks`; `refused`: why no kernel takes its gates."""
        if backend == "fla" and in_chunks:
            say_backend(device_type, backend, None, in_chunks=True)
            if self.kernel is None:
                raise fla.unavailable(f"flash-linear-attention has no {self.name} rule")
            fla.check_available(device_type, dtype)
            return partial(run_row, row=self.kernel.row, recurrence=fla.fast_weight_rule)
        # None if a kernel takes the call.
        reason = self.why_not_native(device_type, dtype, key_dim) or refused
        taken = choose_backend(backend, 2 if in_chunks else 1, reason, self.chunkwise is not None)
        say_backend(device_type, backend, reason, self.chunkwise is not None)
        if taken == "native":
            assert self.kernel is not None
            if backends.fits(device_type, max(key_dim, value_dim)):
                return self.kernel
            # Keys or values beyond the largest dimension of a call: by several calls.
            along = {"key": KEYS, "value": VALUES, "head": None, "head or key": None}
            # Rules that correct read all rows of the state at once: no division over keys.
            dims = (VALUES,) if self.corrects else (VALUES, KEYS)
            return replace(self.kernel, dims=dims, along=(KEYS, KEYS, VALUES, *(along[x.per] for x in self.gates)))
        if taken == "reference":
            return self.reference
        if self.chunkwise is None:
            raise BackendUnavailable(
                f"backend='chunkwise' was asked for: the {self.name} rule has no form that is parallel in time; use "
                "backend='reference'"
            )
        return self.chunkwise


class ReadBeforeWrite(Rule):
    """The delta rule as Mao's published kernel computes it, which reads before it writes, with beta in the key.

        k'_t = beta_t k_t;  y_t = S_{t-1} q_t;  S_t = S_{t-1} + (v_t - S_{t-1} k'_t) k'_t^T

    Eq. 6 of Mao (2022) removes beta_t S_{t-1} k_t k_t^T, this beta_t times as much. Its implementations are those of
    the delta rule: the delta rule's output of step t is the output of step t + 1 here.
    """

    def _run(
        self, inputs: tuple[Any, ...], initial_state: Any, starts: Tensor | None, in_place: bool, backend: str
    ) -> tuple[Tensor, Tensor]:
        q, k, v, beta = inputs
        q, k = reference.ungrouped(q, v), reference.ungrouped(k, v)
        # y_1 = S_0 q_1: the only output that the delta rule, shifted by a step, does not give.
        first = torch.zeros_like(v[:, :1])
        if initial_state is not None:
            with without_autocast(q):
                first = torch.einsum("bthk,bhkv->bthv", q[:, :1].to(initial_state.dtype), initial_state).to(v.dtype)
        # Its beta is 1, as the key has it: k'_t = beta_t k_t.
        key, ones = (k * beta[..., None]).to(k.dtype), torch.ones_like(beta)
        # A document begins with an empty state: its first output is 0, and reaches no gradient of the document before.
        begins = None if starts is None else starts[..., None, None]
        if begins is not None:
            q = q.masked_fill(begins, 0)
        # Step t of the delta rule reads with the query of step t + 1.
        later = torch.cat([q[:, 1:], torch.zeros_like(q[:, :1])], dim=1)
        out, state = super()._run((later, key, v, ones), initial_state, starts, in_place, backend)
        out = torch.cat([first, out[:, :-1]], dim=1)
        return out if begins is None else out.masked_fill(begins, 0), state


def no_steps(
    v: Tensor, sizes: tuple[int, ...], initial_state: Tensor | None, inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:
    """The result of none, for outputs like `v` and states of `sizes`.

    The empty output has a gradient, of zeros, for all that an output depends on.
    """
    # Sums of no rows: nothing is read, nor is anything added to the nothing that there is.
    depends = sum(x[:0].sum() for x in (initial_state, *inputs) if x is not None)
    state = v.new_zeros(sizes, dtype=state_dtype(v.dtype)) if initial_state is None else initial_state.clone()
    return torch.zeros_like(v) + depends, state


# The rows of the recurrence: each rule's gates as its arguments.


def _gated_row(log_gate: Tensor) -> Row:
    """S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T (Peng et al. 2021; Mao 2022, Eq. 5)."""
    return Row(complement=True, log_key_decay=log_gate)


def _decay_row(log_key_decay: Tensor | None, log_value_decay: Tensor | None) -> Row:
    """S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T (Mao 2022, Eq. 7), z the value decay and f the key decay."""
    return Row(log_key_decay=log_key_decay, log_value_decay=log_value_decay)


def _delta_row(beta: Tensor, log_gate: Tensor | None = None) -> Row:
    """S_t = S' + beta_t (v_t - S' k_t) k_t^T, S' = S_{t-1} Diag(f_t).

    Without a gate: Schlag et al. 2021, Eq. 24. With one: Yang et al. 2025; per key: Kimi Team 2025.
    """
    return Row(corrects=True, beta=beta, log_key_decay=log_gate)


def _every_row(
    erase: Tensor | None, beta: Tensor | None, log_key_decay: Tensor | None, log_value_decay: Tensor | None
) -> Row:
    """The recurrence itself."""
    return Row(erase, erase is not None, beta, False, log_key_decay, log_value_decay)


def _row(name: str, gates: tuple[Gate, ...], row: Callable[..., Row], kind: type[Rule] = Rule, **others: Any) -> Rule:
    """Makes the record of a rule that is a row of the recurrence."""
    define, in_chunks = partial(run_row, row=row), partial(run_row, row=row, recurrence=chunkwise.fast_weight_rule)
    return kind(name, gates, define, in_chunks, Kernel(row), takes_starts=True, **others)


def _why_not_every_part(
    erase: Tensor | None, beta: Tensor | None, log_key_decay: Tensor | None, log_value_decay: Tensor | None
) -> str | None:
    if erase is not None and log_value_decay is not None:
        return "no kernel takes decays of values together with an erase key"
    return None


_BETA = Gate("beta", per="head")
_KEY_DECAY = Gate("log_key_decay", per="key", log=True, optional=True)
_VALUE_DECAY = Gate("log_value_decay", per="value", log=True, optional=True)
_CORRECTED: dict[str, Any] = {"corrects": True, "feature_map": "elu", "normalization": frozenset({"sum"})}

# Equations: S (value_dim, key_dim), as in the papers; f, z, g decays, e the erase key.
RULES = {
    rule.name: rule
    for rule in (
        _row(
            "sum",
            (),
            Row,
            operator_checks=True,
            ordered=False,
            equation="S + v k^T",
            help="adds each value under its key (linear Transformer, Performer)",
            source="linear Transformer, Performer (Katharopoulos et al. 2020, Choromanski et al. 2021)",
            feature_map="elu",
            normalization=frozenset({"attention"}),
        ),
        _row(
            "gated",
            (Gate("log_gate", per="head", log=True),),
            _gated_row,
            operator_checks=True,
            equation="g S + (1 - g) v k^T",
            help="decays the memory by one gate per head",
            source="gated fast weights (Peng et al. 2021)",
            feature_map="identity",
        ),
        _row(
            "decay",
            (_KEY_DECAY, _VALUE_DECAY),
            _decay_row,
            equation="(z f^T) * S + v k^T",
            help="decays it by a gate per key and value dimension (Mao 2022)",
            source="decaying fast weights (Mao 2022)",
            feature_map="identity",
        ),
        _row(
            "delta",
            (_BETA,),
            _delta_row,
            operator_checks=True,
            equation="S + beta (v - S k) k^T",
            help="corrects what the key retrieves (Delta Network)",
            source="Delta Network (Schlag, Irie and Schmidhuber 2021)",
            **_CORRECTED,
        ),
        _row(
            "delta-mao",
            (_BETA,),
            _delta_row,
            ReadBeforeWrite,
            equation="S + (v - S k') k'^T with k' = beta k; y = S q is read before the step",
            help="does so as Mao's published kernel, which reads before it writes",
            source="the published kernel of Mao (2022), which is not his Eq. 6",
            **_CORRECTED,
        ),
        _row(
            "gated-delta",
            (Gate("beta", per="head", most=2), Gate("log_gate", per="head or key", log=True)),
            _delta_row,
            operator_checks=True,
            corrects=True,
            equation="S' + beta (v - S' k) k^T with S' = S Diag(f)",
            source="Gated DeltaNet (Yang et al. 2025), Kimi delta attention (Kimi Team 2025)",
        ),
        _row(
            "fast-weight",
            (
                Gate("erase", per="key", kind="key", optional=True),
                Gate("beta", per="head", optional=True, most=2),
                Gate("log_key_decay", per="head or key", log=True, optional=True),
                _VALUE_DECAY,
            ),
            _every_row,
            corrects=True,
            why_not_gates=_why_not_every_part,
            equation="S' + beta (v - S' e) k^T with S' = (z f^T) * S",
            source="the recurrence that contains all of these",
        ),
    )
}
"""The rules by name."""


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Adds every value under its key: S_t = S_{t-1} + v_t k_t^T, y_t = S_t q_t (Schlag et al. 2021, Eq. 10-11, 17).

    Args:
        q: (batch, time, key_heads, key_dim), queries, already through the feature map and normalised.
        k: (batch, time, key_heads, key_dim), keys, as `q`.
        v: (batch, time, heads, value_dim), values; `heads` is a multiple of `key_heads`, and as many heads in turn
            share a head of queries and keys.
        initial_state: (batch, heads, key_dim, value_dim), float32 (float64 for inputs in float64); None for zeros.
        starts: (batch, time), bool: document starts, before which the state is set to 0. None for none.
        in_place: whether the final state is written into `initial_state`, as in generation. Such a call cannot be
            differentiated.
        backend: "auto", "reference", "chunkwise", "native", or "fla" for flash-linear-attention's kernels, as
            `BACKENDS` has them.

    Returns:
        out (batch, time, heads, value_dim), in the dtype of `v`, and the final state, as `initial_state`.

    Raises:
        ValueError: for a shape, dtype or device that does not fit, or for `in_place` without a state, with one that
            shares memory with an input, or where a gradient is wanted; the message names the argument, its value and
            the allowed ones.
        BackendUnavailable: if the backend cannot do this.
        NotImplementedError: of "native", if an input carries a tangent of forward-mode differentiation.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)  # one row, 5 steps, 2 heads of 4
        >>> out, state = sum_rule(q, k, v)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 4]), torch.Size([1, 2, 4, 4]))
        >>> _, first = sum_rule(q[:, :3], k[:, :3], v[:, :3])
        >>> rest, _ = sum_rule(q[:, 3:], k[:, 3:], v[:, 3:], initial_state=first)
        >>> torch.allclose(rest, out[:, 3:], atol=1e-5)
        True
    """
    return RULES["sum"](q, k, v, initial_state=initial_state, starts=starts, in_place=in_place, backend=backend)


class RuleOptions(TypedDict, total=False):
    """The arguments of all rules beside their inputs, as `sum_rule` describes them."""

    initial_state: Tensor | None
    starts: Tensor | None
    in_place: bool
    backend: str


def _as_sum_rule(function: _Function) -> _Function:
    """Adds to a docstring, from that of `sum_rule`, the arguments that all rules have, results and errors.

    The signature shows these arguments too.
    """
    if function.__doc__ and sum_rule.__doc__:
        own, shared = inspect.cleandoc(function.__doc__), inspect.cleandoc(sum_rule.__doc__)
        first, options, end = (shared.index(part) for part in ("    q: ", "    initial_state: ", "Examples:\n"))
        own = own.replace("Args:\n", f"Args:\n{shared[first:options]}", 1)
        function.__doc__ = own.replace("\nExamples:\n", f"{shared[options:end]}Examples:\n", 1)
    signature, of_sum = inspect.signature(function), inspect.signature(sum_rule)
    given = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    given += [x for x in of_sum.parameters.values() if x.kind is x.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    return function


@_as_sum_rule
def gated_rule(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, **options: Unpack[RuleOptions]
) -> tuple[Tensor, Tensor]:
    """One gate for old and new: S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T, y_t = S_t q_t (Mao 2022, Eq. 5).

    Args:
        log_gate: (batch, time, heads), log g_t, at most 0.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
        >>> log_gate = torch.nn.functional.logsigmoid(torch.randn(1, 5, 2))
        >>> out, state = gated_rule(q, k, v, log_gate)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 4]), torch.Size([1, 2, 4, 4]))
    """
    return RULES["gated"](q, k, v, log_gate, **options)


@_as_sum_rule
def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    **options: Unpack[RuleOptions],
) -> tuple[Tensor, Tensor]:
    """An elementwise decay of rank one: S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T, y_t = S_t q_t (Mao 2022, Eq. 7).

    Args:
        log_key_decay: (batch, time, heads, key_dim), log f_t, at most 0; None for no decay of keys.
        log_value_decay: (batch, time, heads, value_dim), log z_t, at most 0; None for no decay of values.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
        >>> out, state = decay_rule(q, k, v, -torch.rand(1, 5, 2, 4), None)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 4]), torch.Size([1, 2, 4, 4]))
    """
    return RULES["decay"](q, k, v, log_key_decay, log_value_decay, **options)


@_as_sum_rule
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Unpack[RuleOptions]) -> tuple[Tensor, Tensor]:
    """Corrects the value that the key retrieves: S_t = S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T, y_t = S_t q_t.

    Schlag et al. 2021, Eq. 24 and 25. Keys should be normalised (their components sum to 1, or their norm is at most
    1): a step multiplies the state by I - beta k k^T, which makes it grow if |k|^2 > 2 / beta.

    Args:
        beta: (batch, time, heads), from 0 to 1.

    Examples:
        >>> k = torch.eye(4)[[0, 1, 0]].view(1, 3, 1, 4)  # the first key comes again
        >>> v = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
        >>> out, state = delta_rule(k, k, v, torch.ones(1, 3, 1))
        >>> state.flatten()  # its value was replaced; the sum rule would have 4 there
        tensor([3., 2., 0., 0.])
    """
    return RULES["delta"](q, k, v, beta, **options)


@_as_sum_rule
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor, **options: Unpack[RuleOptions]
) -> tuple[Tensor, Tensor]:
    """Forgets, then corrects: S' = S_{t-1} Diag(f_t), S_t = S' + beta_t (v_t - S' k_t) k_t^T, y_t = S_t q_t.

    With a gate for each head this is Gated DeltaNet (Yang et al. 2025), with one for each key dimension Kimi delta
    attention (Kimi Team 2025). Keys should have a norm of at most 1, as in `delta_rule`.

    Args:
        beta: (batch, time, heads), from 0 to 1; up to 2 if the value that a key retrieves may change its sign
            (negative eigenvalues).
        log_gate: (batch, time, heads) or (batch, time, heads, key_dim), log f_t, at most 0.

    Examples:
        >>> q = k = torch.nn.functional.normalize(torch.randn(1, 5, 2, 4), dim=-1)
        >>> v, beta, log_gate = torch.randn(1, 5, 2, 3), torch.rand(1, 5, 2), -torch.rand(1, 5, 2)
        >>> out, state = gated_delta_rule(q, k, v, beta, log_gate)
        >>> out.shape, state.shape
        (torch.Size([1, 5, 2, 3]), torch.Size([1, 2, 4, 3]))
    """
    return RULES["gated-delta"](q, k, v, beta, log_gate, **options)


@_as_sum_rule
def fast_weight_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    erase: Tensor | None = None,
    beta: Tensor | None = None,
    log_key_decay: Tensor | None = None,
    log_value_decay: Tensor | None = None,
    **options: Unpack[RuleOptions],
) -> tuple[Tensor, Tensor]:
    """The recurrence that contains all rules, with every part but q, k and v optional.

    S' = (z_t f_t^T) * S_{t-1}, S_t = S' + beta_t (v_t - S' e_t) k_t^T, y_t = S_t q_t. With e = 0 it adds (sum, decay),
    with e = k it corrects (delta, gated delta). With an e of its own it erases under another key than it writes under
    (the two-gate delta rule: e = b * k, v = w * v').

    Args:
        erase: (batch, time, heads of k, key_dim), e_t; the value that it retrieves is subtracted. None for 0.
        beta: (batch, time, heads), from 0 to 2; None for 1.
        log_key_decay: (batch, time, heads) or (batch, time, heads, key_dim), log f_t, at most 0; None for no decay.
        log_value_decay: (batch, time, heads, value_dim), log z_t, at most 0; None for no decay. With `erase` no kernel
            takes it, and "chunkwise" goes step by step.

    Examples:
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
        >>> corrected, _ = fast_weight_rule(q, k / 2, v, erase=k / 2)
        >>> torch.allclose(corrected, delta_rule(q, k / 2, v, torch.ones(1, 5, 2))[0], atol=1e-5)
        True
    """
    return RULES["fast-weight"](q, k, v, erase, beta, log_key_decay, log_value_decay, **options)


def chosen_backend(
    device: torch.device | str, dtype: torch.dtype, time: int, rule: str = "sum", key_dim: int = 1
) -> str:
    """The backend that "auto" takes.

    It knows no gates and no `starts`: for gates that no kernel takes (`erase` with `log_value_decay`) "auto" chooses as
    without kernels.

    Args:
        device: where the tensors are.
        dtype: of q, k and v.
        time: how many steps the call has.
        rule: a key of `RULES`.
        key_dim: of the keys; it matters only for rules that correct, with keys larger than a GPU's kernels take.

    Returns:
        one of `BACKENDS`.

    Raises:
        ValueError: for a rule that is none of these.

    Examples:
        >>> chosen_backend("cpu", torch.float32, time=128, rule="delta") in ("native", "chunkwise")
        True
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
    return RULES[rule].best_backend(torch.device(device).type, dtype, time, key_dim)
