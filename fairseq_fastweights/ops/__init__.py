"""The update rules as pure functions of tensors.

Sequences are (batch, time, heads, dim), states (batch, heads, key_dim, value_dim). Every operation returns
``(out, final_state)``: `out` is (batch, time, heads, value_dim) in the dtype of `v`, states are float32 (float64 for
float64 inputs). Any strides will do as long as the last dimension of q, k and v is contiguous.

`backend` is "reference" (one step at a time: the definition), "chunkwise" (chunk-parallel PyTorch), "native"
(compiled kernels) or "auto" (`chosen_backend`: native where it was built). A backend that cannot do what is asked
raises `BackendUnavailable`; none ever stands in for another in silence. Backward passes are everyone's; forward-mode
derivatives (`torch.func.jvp`) only "reference" has.

With `in_place` the final state is written into `initial_state`, which is returned as the final state: generation, a
token at a time, then moves no more than the state. Nothing of such a call can be differentiated.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fairseq_fastweights.ops import chunkwise, divided, native, reference
from fairseq_fastweights.ops.checks import check_in_place, check_inputs, check_values, state_dtype
from fairseq_fastweights.ops.native import BackendUnavailable

BACKENDS = ("auto", "reference", "chunkwise", "native")

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "check_values",
    "chosen_backend",
    "decay_rule",
    "delta_rule",
    "gated_rule",
    "state_dtype",
    "sum_rule",
]


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Adds every value under its key: S_t = S_{t-1} + v_t k_t^T, y_t = S_t q_t (Schlag et al. 2021, Eq. 10-11, 17).

    Args:
        q, k: (batch, time, heads, key_dim), already through the feature map and normalised.
        v: (batch, time, heads, value_dim).
        initial_state: (batch, heads, key_dim, value_dim), None for zeros.
        in_place: whether the final state replaces the initial one where that lies.
        backend: one of `BACKENDS`.

    Returns:
        out (batch, time, heads, value_dim) and the final state (batch, heads, key_dim, value_dim).

    Raises:
        ValueError: for a shape, dtype or device that does not fit, or `in_place` without a state or where a gradient is
            wanted; the message names the argument.
        BackendUnavailable: if the backend cannot do it.
        NotImplementedError: of "native", if an input carries a tangent of forward-mode differentiation.
    """
    check_inputs(q, k, v, initial_state)
    return _run("sum", backend, in_place, initial_state, q, k, v)


def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor,
    *,
    initial_state: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One gate for old and new: S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T, y_t = S_t q_t (Mao 2022, Eq. 5).

    Args:
        log_gate: (batch, time, heads), log g_t, at most 0.
        others: as in `sum_rule`, which also says what is returned and raised.
    """
    check_inputs(q, k, v, initial_state, log_gates={"log_gate": log_gate})
    return _run("gated", backend, in_place, initial_state, q, k, v, log_gate)


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """An elementwise decay of rank one: S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T, y_t = S_t q_t (Mao 2022, Eq. 7).

    Args:
        log_key_decay: (batch, time, heads, key_dim), log f_t, at most 0; None for no decay.
        log_value_decay: (batch, time, heads, value_dim), log z_t, at most 0; None for no decay.
        others: as in `sum_rule`, which also says what is returned and raised.
    """
    check_inputs(q, k, v, initial_state, log_key_decay=log_key_decay, log_value_decay=log_value_decay)
    return _run("decay", backend, in_place, initial_state, q, k, v, log_key_decay, log_value_decay)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Corrects what the key retrieves: S_t = S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T, y_t = S_t q_t.

    Schlag et al. 2021, Eq. 24 and 25. Keys should be normalised (their components sum to 1, or their norm is at most
    1): a step multiplies the state by I - beta k k^T, which for |k|^2 > 2 / beta makes it grow.

    Args:
        beta: (batch, time, heads), the write strength in [0, 1].
        others: as in `sum_rule`, which also says what is returned and raised.
    """
    check_inputs(q, k, v, initial_state, strengths={"beta": beta})
    return _run("delta", backend, in_place, initial_state, q, k, v, beta)


def chosen_backend(
    device: torch.device | str, dtype: torch.dtype, time: int, rule: str = "sum", key_dim: int = 1
) -> str:
    """What "auto" takes for tensors on `device`, of `dtype`, with `time` steps.

    That depends on `rule` ("sum", "gated", "decay", "delta") and `key_dim` only for keys of the delta rule that are
    larger than a GPU's kernels take.
    """
    kind = torch.device(device).type
    if native.why_not(kind, dtype) is None and native.takes(rule, kind, key_dim):
        return "native"
    # A single step has nothing to chunk: the reference's loop over time is that step.
    return "reference" if time == 1 else "chunkwise"


def _implementation(rule: str, backend: str, k: Tensor, v: Tensor) -> ModuleType:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = chosen_backend(v.device, v.dtype, v.shape[1], rule, k.shape[-1])
    if backend == "native":
        kind, key_dim = v.device.type, k.shape[-1]
        native.require(rule, kind, v.dtype, key_dim)
        return native if native.fits(kind, max(key_dim, v.shape[-1])) else divided
    return reference if backend == "reference" else chunkwise


def _run(
    rule: str, backend: str, in_place: bool, initial_state: Tensor | None, *inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs a rule, by its name, on inputs that were checked: q, k, v and the gates."""
    _, k, v, *_ = inputs
    assert k is not None and v is not None
    implementation = _implementation(rule, backend, k, v)
    compiled = implementation is native or implementation is divided
    if compiled:
        native.refuse_tangents(initial_state, *inputs)
    if not in_place:
        if v.shape[1] == 0:
            return _nothing(k, v, initial_state, inputs)
        return getattr(implementation, f"{rule}_rule")(*inputs, initial_state=initial_state)
    state = check_in_place(initial_state, *inputs)
    if v.shape[1] == 0:
        return torch.zeros_like(v), state
    if compiled and v.shape[1] == 1 and native.can_change(state):
        return getattr(implementation, f"{rule}_step_")(*inputs, state=state), state
    out, final_state = getattr(implementation, f"{rule}_rule")(*inputs, initial_state=state)
    return out, state.copy_(final_state)


def _nothing(
    k: Tensor, v: Tensor, initial_state: Tensor | None, inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:
    """The result of no steps at all. Its empty output has a gradient, of zeros, for all that an output depends on."""
    # Sums of no rows: nothing is read, nor is anything added to the nothing that there is.
    depends = sum(x[:0].sum() for x in (initial_state, *inputs) if x is not None)
    if initial_state is None:
        batch, _, heads, key_dim = k.shape
        initial_state = torch.zeros(batch, heads, key_dim, v.shape[-1], dtype=state_dtype(v.dtype), device=v.device)
    return torch.zeros_like(v) + depends, initial_state.clone()
