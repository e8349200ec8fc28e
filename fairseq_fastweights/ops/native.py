"""The compiled kernels (`cpu/`, `cuda/`): which calls they take, and what they are given of a rule.

`native_operators` declares them to torch.

The kernels keep, for the backward pass, the inputs and a state every `interval` steps; it computes those in between
again. Every result has the same bits on every run. On a CPU the number of threads changes none of them either, but
where there are fewer heads than threads: these share a head's value columns, and gradients that sum over columns (those
of q, k, write strengths and gates but those of values) are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights.ops import libraries, native_operators
from fairseq_fastweights.ops.checks import BackendUnavailable, state_dtype
from fairseq_fastweights.ops.gates import decay_at_starts, one_minus_gate
from fairseq_fastweights.ops.native_operators import NAMESPACE as NAMESPACE
from fairseq_fastweights.ops.reference import ungrouped

DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    "cuda": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
}
"""By type of device, the dtypes that its kernels take."""
EXTENSIONS = {"cpu": "cpu", "cuda": "cuda"}
"""By type of device, whose kernels its tensors are given to."""
LARGEST_DIM = {"cuda": 512}
"""By type of device, the largest key and value dimension that one call of its kernels takes, where there is a largest.

Larger ones are divided (`divided`), but for the delta rule's keys.
"""
INTERVALS = {"cpu": (64,), "cuda": (64, 128, 256)}
"""By type of device, the steps that may lie between the states that are kept for the backward pass."""

# Looked up once: to find it by its name at each call takes as long as a tenth of a step.
_rule_step = torch.ops.fairseq_fastweights.rule_step_.default

SCAN_INTERVAL = 32
"""The steps that lie between the states that the selective scan keeps for the backward pass."""


@torch.compiler.assume_constant_result
def why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """Why there are no kernels for tensors on such a device, with how to mend it; None if there are."""
    if device_type not in DTYPES:
        return f"there are no compiled kernels for devices of type {device_type}, only for {' and '.join(DTYPES)}"
    if dtype not in DTYPES[device_type]:
        return f"the {device_type} kernels do not take {dtype}"
    return libraries.load(device_type)


def fits(device_type: str, dim: int) -> bool:
    """True if one call of the kernels for such a device takes key and value dimensions of up to `dim`."""
    return dim <= LARGEST_DIM.get(device_type, dim)


def refuse_tangents(*inputs: Tensor | None) -> None:
    """Raises `NotImplementedError` if one of them carries a tangent, which the kernels would drop in silence."""
    # Of the level first: where there is none, as nearly always, no tensor is asked, and a call takes no longer.
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    ):
        raise NotImplementedError(
            "initial_state or an input carries a tangent, and backend='native' (which 'auto' takes here) has no "
            "forward-mode derivatives; use backend='reference', which has them"
        )


def cpu_instruction_set() -> str:
    """The instruction set of the CPU kernels that run on this processor: "baseline", "avx2" or "avx512".

    The environment variable ``FASTWEIGHTS_CPU_ISA`` asks for one of those that it has.

    Raises:
        BackendUnavailable: if there are no CPU kernels.
    """
    if (reason := libraries.load("cpu")) is not None:
        raise BackendUnavailable(reason)
    return torch.ops.fairseq_fastweights.cpu_instruction_set()


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
        out, final_state, _ = native_operators.rule_forward(
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
        out = _rule_step(*self.given(q, k, v, gates, starts), state)
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
    out, final_state, _ = native_operators.selective_scan_forward(
        u, delta, A, B, C, D, initial_state, SCAN_INTERVAL if keeps else 0
    )
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
