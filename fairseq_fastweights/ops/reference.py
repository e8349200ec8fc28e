"""The update rules one step at a time, as in the papers: what every other implementation is held against.

The papers write the state as W or S of shape (value_dim, key_dim), y = S q. Here, as in the rest of the package, the
state is its transpose, (batch, heads, key_dim, value_dim), so that S_t += v_t k_t^T reads ``state += outer(k_t, v_t)``.
Gradients are those that autograd finds through the loop. Everything is computed in float64 for float64 inputs and in
float32 for all others, under autocast too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import state_dtype


def sum_rule(q: Tensor, k: Tensor, v: Tensor, *, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + v_t k_t^T (Schlag et al. 2021, Eq. 17; Mao 2022, Eq. 3)."""
    return _decaying(q, k, v, initial_state)


def gated_rule(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T (Peng et al. 2021; Mao 2022, Eq. 5)."""
    log_gate = log_gate.to(state_dtype(v.dtype))[..., None]
    # 1 - exp(x) loses the digits of the value for a gate near 1, -expm1(x), whose derivative autograd computes as
    # expm1(x) + 1, those of the gradient for a gate near 0: each is taken where it is exact.
    write = torch.where(log_gate > -0.7, -torch.expm1(log_gate), 1 - torch.exp(log_gate))
    return _decaying(q, k, v, initial_state, log_key_decay=log_gate, write=write)


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T (Mao 2022, Eq. 7), z the value decay and f the key decay."""
    return _decaying(q, k, v, initial_state, log_key_decay=log_key_decay, log_value_decay=log_value_decay)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T (Schlag et al. 2021, Eq. 24), read after the write (Eq. 25)."""
    dtype = state_dtype(v.dtype)
    state = _start(k, v, initial_state)
    outputs = []
    for q_t, k_t, v_t, beta_t in zip(*_steps(dtype, q, k, v, beta), strict=True):
        retrieved = _read(k_t, state)
        error = beta_t[..., None] * (v_t - retrieved)
        state = state + k_t[..., :, None] * error[..., None, :]
        outputs.append(_read(q_t, state))
    return _stack(outputs, v), state


def _decaying(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    *,
    log_key_decay: Tensor | None = None,
    log_value_decay: Tensor | None = None,
    write: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (z_t f_t^T) * S_{t-1} + w_t v_t k_t^T; f, z, w are 1 where they are None."""
    dtype = state_dtype(v.dtype)
    state = _start(k, v, initial_state)
    outputs = []
    steps = zip(*_steps(dtype, q, k, v, log_key_decay, log_value_decay, write), strict=True)
    for q_t, k_t, v_t, log_f_t, log_z_t, w_t in steps:
        if log_f_t is not None:
            state = state * log_f_t.exp()[..., :, None]
        if log_z_t is not None:
            state = state * log_z_t.exp()[..., None, :]
        if w_t is not None:
            k_t = k_t * w_t
        state = state + k_t[..., :, None] * v_t[..., None, :]
        outputs.append(_read(q_t, state))
    return _stack(outputs, v), state


def _read(q_t: Tensor, state: Tensor) -> Tensor:
    """S_t q_t. Autocast runs matrix products in half precision: backwards too, where nothing here could stop it."""
    return (q_t[..., :, None] * state).sum(-2)


def _start(k: Tensor, v: Tensor, initial_state: Tensor | None) -> Tensor:
    if initial_state is not None:
        return initial_state
    batch, _, heads, key_dim = k.shape
    return k.new_zeros(batch, heads, key_dim, v.shape[3], dtype=state_dtype(v.dtype))


def _steps(dtype: torch.dtype, first: Tensor, *others: Tensor | None) -> list[Sequence[Any]]:
    """Each input's steps. Taking them apart at once, not by index, keeps the backward pass linear in time."""
    absent = [None] * first.shape[1]
    return [first.to(dtype).unbind(1), *(absent if x is None else x.to(dtype).unbind(1) for x in others)]


def _stack(outputs: list[Tensor], v: Tensor) -> Tensor:
    return torch.stack(outputs, dim=1).to(v.dtype) if outputs else torch.zeros_like(v)
