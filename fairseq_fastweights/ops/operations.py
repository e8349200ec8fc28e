"""The update rules: a record each, from which all else that depends on the rule follows.

That is what is checked before it runs, which backend "auto" takes, how a call that is too large for the kernels is
divided, and what `python -m fairseq_fastweights.env` lists; the layers, the models' options and their help, the tables
of the documentation, the benchmark's cases and those of the tests. A rule of one's own needs no more than a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.ops import chunkwise, libraries, native, reference
from fairseq_fastweights.ops.autocast import without_autocast
from fairseq_fastweights.ops.checks import (
    BackendUnavailable,
    Gate,
    check_in_place,
    check_inputs,
    state_dtype,
    values_are_checked,
)
from fairseq_fastweights.ops.choice import choose_backend, say_backend
from fairseq_fastweights.ops.divided import KEYS, VALUES, Divided
from fairseq_fastweights.ops.native import Kernel

Implementation = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rule:
    """An update rule, whatever computes it: called with q, k, v and its gates in order.

    Attributes:
        name: of the rule.
        gates: what it takes beside q, k and v, in order.
        reference: the definition, one step at a time: (q, k, v, *gates, initial_state=...) -> (out, final_state).
        chunkwise: the same, parallel in time, in PyTorch; None if there is no such form.
        kernel: the same, compiled; None if there is none.
        corrects: whether a write depends on what is already stored. If so, the rows of a state, one for each key, hang
            together: calls cannot be divided over keys (over the columns, one for each value, they always can). Nor is
            a layer's normaliser of attention normalisation one more column of the state, but a sum of its own (Schlag
            et al. 2021, Eq. 26), with the rule's decays of keys.
        takes_starts: whether its implementations take `starts`, and q and k of fewer heads than v.
        ordered: whether the order matters in which pairs are written. An encoder reads its source as a whole, without
            an order in which a memory could forget or correct.
        equation: the memory after a step, S being that before it, (value_dim, key_dim).
        help: what it does, for `--help`.
        source: model and paper that it is from.
        feature_map: that of the paper's layers; None for a rule that `mixers.FastWeightAttention` does not have.
        normalization: those of the paper's layers.
        inputs: the names of what it takes, in order.

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
    inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: a step, which takes microseconds, gives them to its checks.
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
        q, k, v, *gates = inputs
        fault: Exception | None = None
        if in_place and self._may_take_step(v, backend):
            try:
                out = self._step(q, k, v, gates, initial_state, starts)
                if out is not None:
                    return out, initial_state  # type: ignore[return-value]
            except Exception as error:
                fault = error  # an argument's, which the checks below name, or the kernel's own
        sizes = check_inputs(q, k, v, initial_state, self.gates, gates, starts)  # type: ignore[arg-type]
        batch, time, heads, key_heads, key_dim, value_dim = sizes
        assert v is not None
        if not self.takes_starts and (starts is not None or key_heads != heads):
            what = "starts" if starts is not None else f"k of {key_heads} heads for v of {heads}"
            raise ValueError(
                f"the {self.name} rule was given {what}; it takes neither starts nor fewer heads of q and k"
            )
        kernel, plain = self._implementation(backend, v, time, key_dim, gates)
        options = {} if starts is None else {"starts": starts}
        if kernel is not None:
            native.refuse_tangents(initial_state, *inputs)
        state = check_in_place(initial_state, self.inputs, inputs, starts) if in_place else None
        if fault is not None:
            raise fault
        if time == 0:
            if state is not None:
                return torch.zeros_like(v), state
            return no_steps(v, (batch, heads, key_dim, value_dim), initial_state, inputs)
        if state is None:
            return plain(*inputs, initial_state=initial_state, **options)
        if kernel is not None and time == 1 and native.can_change(state):
            return kernel.step_(q, k, v, *gates, state=state, **options), state  # type: ignore[arg-type]
        out, final_state = plain(*inputs, initial_state=state, **options)
        return out, state.copy_(final_state)

    def best_backend(self, device_type: str, dtype: torch.dtype, time: int, key_dim: int) -> str:
        """The backend that "auto" takes."""
        return choose_backend(
            "auto", time, self.why_not_native(device_type, dtype, key_dim), self.chunkwise is not None
        )

    def why_not_native(self, device_type: str, dtype: torch.dtype, key_dim: int) -> str | None:
        """Why no kernel takes such inputs; None if one does."""
        if self.kernel is None:
            return f"the {self.name} rule has no compiled kernel"
        reason = native.why_not(device_type, dtype)
        if reason is None and self.corrects and not native.fits(device_type, key_dim):
            largest = native.LARGEST_DIM[device_type]
            return (
                f"the {device_type} kernels take the {self.name} rule with key dimensions of up to {largest}, not "
                f"{key_dim}"
            )
        return reason

    @property
    def divided(self) -> Divided:
        """The rule's kernel, for keys and values of any dimension."""
        assert self.kernel is not None
        along = {"key": KEYS, "value": VALUES, "head": None, "head or key": None}
        dims = (VALUES,) if self.corrects else (VALUES, KEYS)
        return Divided(self.kernel, dims, (KEYS, KEYS, VALUES, *(along[gate.per] for gate in self.gates)))

    def _may_take_step(self, v: Any, backend: str) -> bool:
        """True if a call in place may be one step of a CPU's kernels that check what they are given."""
        return (
            self.kernel is not None
            and self.kernel.checked
            and backend in ("auto", "native")
            and isinstance(v, Tensor)
            and v.is_cpu
            and v.dim() == 4
            and v.shape[1] == 1
            and not values_are_checked()
            and not torch.compiler.is_compiling()
            and "cpu" not in native.LARGEST_DIM
            and libraries.load("cpu") is None
        )

    def _step(self, q: Any, k: Any, v: Any, gates: list[Any], state: Any, starts: Any) -> Tensor | None:
        """`out` of one step in place; None for what the operator does not refuse, but must not be given.

        The operator checks shapes and types before it changes anything. Checked here are devices, strides, memory that
        is shared, and that q is shaped as k. `check_inputs`, which names what is wrong, takes as long as the operator:
        it is left for what is refused.
        """
        assert self.kernel is not None
        if q.shape != k.shape:
            return None
        for x in (q, k, v):
            if not x.is_contiguous() and x.stride(-1) not in (0, 1):
                return None
        for x in (q, k, state, *gates):
            if not x.is_cpu:
                return None
        if (starts is not None and not starts.is_cpu) or not native.can_change(state):
            return None
        native.refuse_tangents(state, q, k, v, *gates)
        check_in_place(state, self.inputs, (q, k, v, *gates), starts)
        return self.kernel.step_(q, k, v, *gates, state=state, starts=starts)

    def _implementation(
        self, backend: str, v: Tensor, time: int, key_dim: int, gates: list[Tensor | None]
    ) -> tuple[Kernel | Divided | None, Implementation]:
        """The kernel, if that is what runs, and what runs for a sequence."""
        kind = v.device.type
        reason = self.why_not_native(kind, v.dtype, key_dim)
        if reason is None and self.kernel is not None and self.kernel.why_not_these is not None:
            reason = self.kernel.why_not_these(*gates)
        asked, in_chunks = backend, self.chunkwise is not None
        backend = choose_backend(asked, time, reason, in_chunks)
        say_backend(kind, asked, reason, in_chunks)
        if backend == "native":
            assert self.kernel is not None
            kernel = self.kernel if native.fits(kind, max(key_dim, v.shape[-1])) else self.divided
            return kernel, kernel.sequence
        if backend == "reference":
            return None, self.reference
        if self.chunkwise is None:
            raise BackendUnavailable(
                f"backend='chunkwise' was asked for: the {self.name} rule has no form that is parallel in time; use "
                "backend='reference'"
            )
        return None, self.chunkwise


class ReadBeforeWrite(Rule):
    """The delta rule as Mao's published kernel computes it, which reads before it writes, with beta in the key.

        k'_t = beta_t k_t;  y_t = S_{t-1} q_t;  S_t = S_{t-1} + (v_t - S_{t-1} k'_t) k'_t^T

    Eq. 6 of Mao (2022) removes beta_t S_{t-1} k_t k_t^T, this beta_t times as much. Its implementations are those of
    the delta rule: what a step reads after it has written is what the next reads before that.
    """

    def __call__(self, *inputs: Any, initial_state: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Runs it, as `Rule` does."""
        starts = options.get("starts")
        q, k, v, beta = inputs
        check_inputs(q, k, v, initial_state, self.gates, (beta,), starts)
        q, k = reference.ungrouped(q, v), reference.ungrouped(k, v)
        first = torch.zeros_like(v[:, :1])
        if initial_state is not None:
            with without_autocast(q):
                first = torch.einsum("bthk,bhkv->bthv", q[:, :1].to(initial_state.dtype), initial_state).to(v.dtype)
        key, ones = (k * beta[..., None]).to(k.dtype), torch.ones_like(beta)
        if starts is not None:  # nothing is read there; what comes after a document must not reach its gradients
            q = q.masked_fill(starts[..., None, None], 0)
        later = torch.cat([q[:, 1:], torch.zeros_like(q[:, :1])], dim=1)
        out, state = super().__call__(later, key, v, ones, initial_state=initial_state, **options)
        out = torch.cat([first, out[:, :-1]], dim=1)
        # A document begins with an empty memory.
        return out if starts is None else out.masked_fill(starts[..., None, None], 0), state


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


def _row(
    name: str, gates: tuple[Gate, ...], row: Implementation, kernel: Kernel, kind: type[Rule] = Rule, **others: Any
) -> Rule:
    """Makes the record of a rule that is a row of the recurrence."""
    in_chunks = partial(row, recurrence=chunkwise.fast_weight_rule)
    return kind(name, gates, row, in_chunks, kernel, takes_starts=True, **others)


_BETA = Gate("beta", per="head")
_KEY_DECAY = Gate("log_key_decay", per="key", log=True, optional=True)
_VALUE_DECAY = Gate("log_value_decay", per="value", log=True, optional=True)
_CORRECTED: dict[str, Any] = {"corrects": True, "feature_map": "elu", "normalization": frozenset({"sum"})}

RULES = {
    rule.name: rule
    for rule in (
        _row(
            "sum",
            (),
            reference.sum_rule,
            Kernel(native.Arguments, checked=True),
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
            reference.gated_rule,
            Kernel(native.one_gate, checked=True),
            equation="g S + (1 - g) v k^T",
            help="decays the memory by one gate per head",
            source="gated fast weights (Peng et al. 2021)",
            feature_map="identity",
        ),
        _row(
            "decay",
            (_KEY_DECAY, _VALUE_DECAY),
            reference.decay_rule,
            Kernel(native.decays),
            equation="(z f^T) * S + v k^T",
            help="decays it by a gate per key and value dimension (Mao 2022)",
            source="decaying fast weights (Mao 2022)",
            feature_map="identity",
        ),
        _row(
            "delta",
            (_BETA,),
            reference.delta_rule,
            Kernel(native.correction, checked=True),
            equation="S + beta (v - S k) k^T",
            help="corrects what the key retrieves (Delta Network)",
            source="Delta Network (Schlag, Irie and Schmidhuber 2021)",
            **_CORRECTED,
        ),
        _row(
            "delta-mao",
            (_BETA,),
            reference.delta_rule,
            Kernel(native.correction, checked=True),
            ReadBeforeWrite,
            equation="S + (v - S k') k'^T with k' = beta k; y = S q is read before the step",
            help="does so as Mao's published kernel, which reads before it writes",
            source="the published kernel of Mao (2022), which is not his Eq. 6",
            **_CORRECTED,
        ),
        _row(
            "gated-delta",
            (Gate("beta", per="head", most=2), Gate("log_gate", per="head or key", log=True)),
            reference.gated_delta_rule,
            Kernel(native.correction, checked=True),
            corrects=True,
            equation="S' + beta (v - S' k) k^T with S' = S Diag(f)",
            source="Gated DeltaNet (Yang et al. 2025), Kimi delta attention (Kimi Team 2025)",
        ),
        Rule(
            "fast-weight",
            (
                Gate("erase", per="key", is_key=True, optional=True),
                Gate("beta", per="head", optional=True, most=2),
                Gate("log_key_decay", per="head or key", log=True, optional=True),
                _VALUE_DECAY,
            ),
            reference.fast_weight_rule,
            chunkwise.fast_weight_rule,
            Kernel(native.every_part, native.why_not_every_part),
            corrects=True,
            takes_starts=True,
            equation="S' + beta (v - S' e) k^T with S' = (z f^T) * S",
            source="the recurrence that contains all of these",
        ),
    )
}
"""The rules by name."""
