"""The update rules as pure functions of tensors.

Sequences are (batch, time, heads, dim), states (batch, heads, key_dim, value_dim). Every operation returns
``(out, final_state)``: `out` is (batch, time, heads, value_dim) in the dtype of `v`, states are float32 (float64 for
float64 inputs). Any strides will do as long as the last dimension of q, k and v is contiguous.

`backend` is "auto", "reference" (one step at a time: the definition), "chunkwise" (chunk-parallel PyTorch) or
"native" (compiled kernels). A backend that cannot do what is asked raises `BackendUnavailable`; none ever stands in
for another in silence.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fairseq_fastweights.ops import chunkwise, native, reference
from fairseq_fastweights.ops.checks import check_inputs, check_values, state_dtype
from fairseq_fastweights.ops.native import BackendUnavailable

BACKENDS = ("auto", "reference", "chunkwise", "native")

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "check_values",
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
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Adds every value under its key: S_t = S_{t-1} + v_t k_t^T, y_t = S_t q_t (Schlag et al. 2021, Eq. 10-11, 17).

    Args:
        q, k: (batch, time, heads, key_dim), already through the feature map and normalised.
        v: (batch, time, heads, value_dim).
        initial_state: (batch, heads, key_dim, value_dim), None for zeros.
        backend: one of `BACKENDS`.

    Returns:
        out (batch, time, heads, value_dim) and the final state (batch, heads, key_dim, value_dim).

    Raises:
        ValueError: for a shape, dtype or device that does not fit; the message names the argument.
        BackendUnavailable: if the backend cannot do it.
    """
    check_inputs(q, k, v, initial_state)
    implementation = _implementation(backend, v)
    if v.shape[1] == 0:
        return _nothing(k, v, initial_state)
    return implementation.sum_rule(q, k, v, initial_state=initial_state)


def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor,
    *,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One gate for old and new: S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T, y_t = S_t q_t (Mao 2022, Eq. 5).

    Args:
        log_gate: (batch, time, heads), log g_t, at most 0.
        others: as in `sum_rule`, which also says what is returned and raised.
    """
    check_inputs(q, k, v, initial_state, log_gates={"log_gate": log_gate})
    implementation = _implementation(backend, v)
    if v.shape[1] == 0:
        return _nothing(k, v, initial_state)
    return implementation.gated_rule(q, k, v, log_gate, initial_state=initial_state)


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """An elementwise decay of rank one: S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T, y_t = S_t q_t (Mao 2022, Eq. 7).

    Args:
        log_key_decay: (batch, time, heads, key_dim), log f_t, at most 0; None for no decay.
        log_value_decay: (batch, time, heads, value_dim), log z_t, at most 0; None for no decay.
        others: as in `sum_rule`, which also says what is returned and raised.
    """
    check_inputs(q, k, v, initial_state, log_key_decay=log_key_decay, log_value_decay=log_value_decay)
    implementation = _implementation(backend, v)
    if v.shape[1] == 0:
        return _nothing(k, v, initial_state)
    return implementation.decay_rule(q, k, v, log_key_decay, log_value_decay, initial_state=initial_state)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
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
    implementation = _implementation(backend, v)
    if v.shape[1] == 0:
        return _nothing(k, v, initial_state)
    return implementation.delta_rule(q, k, v, beta, initial_state=initial_state)


def _implementation(backend: str, v: Tensor) -> ModuleType:
    if backend == "auto":
        # A single step has nothing to chunk: the reference's loop over time is that step.
        return reference if v.shape[1] == 1 else chunkwise
    if backend == "reference":
        return reference
    if backend == "chunkwise":
        return chunkwise
    if backend == "native":
        native.require()
    raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")


def _nothing(k: Tensor, v: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result of no steps at all."""
    if initial_state is None:
        batch, _, heads, key_dim = k.shape
        initial_state = torch.zeros(batch, heads, key_dim, v.shape[-1], dtype=state_dtype(v.dtype), device=v.device)
    return torch.zeros_like(v), initial_state.clone()
