"""The update rules one step at a time, as in the papers: every other implementation is compared with these.

All are rows of one recurrence, `fast_weight_rule`. The papers write the state as W or S of shape (value_dim, key_dim),
y = S q. Here, as in the rest of the package, the state is its transpose, (batch, heads, key_dim, value_dim), so that
S_t += v_t k_t^T reads ``state += outer(k_t, v_t)``. Gradients are those that autograd finds through the loop.
Everything is computed in float64 for float64 inputs and in float32 for all others, under autocast too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import state_dtype

Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""`fast_weight_rule`, or another implementation of it."""


def fast_weight_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor | None,
    beta: Tensor | None,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S' + beta_t (v_t - S' e_t) k_t^T, S' = (z_t f_t^T) * S_{t-1}, y_t = S_t q_t; a None is left out.

    log_key_decay may be (batch, time, heads), the same for all keys. Heads of q, k and e serve as many of v in turn.
    """
    dtype = state_dtype(v.dtype)
    q, k = ungrouped(q, v), ungrouped(k, v)
    erase = None if erase is None else ungrouped(erase, v)
    if log_key_decay is not None and log_key_decay.dim() == 3:
        log_key_decay = log_key_decay[..., None]
    kept = None if starts is None else ~starts[..., None, None, None]
    if initial_state is None:
        batch, _, heads, key_dim = k.shape
        initial_state = k.new_zeros(batch, heads, key_dim, v.shape[3], dtype=dtype)
    state = initial_state
    outputs = []
    inputs = (q, k, v, erase, beta, log_key_decay, log_value_decay)
    for q_t, k_t, v_t, e_t, beta_t, log_f_t, log_z_t, kept_t in zip(
        *_steps(dtype, *inputs), _each(kept, v), strict=True
    ):
        # A document starts from 0; torch.where also keeps a NaN of the last document out.
        if kept_t is not None:
            state = torch.where(kept_t, state, 0)
        # S' = (z_t f_t^T) * S_{t-1}; here rows of the state are keys, columns values.
        if log_f_t is not None:
            state = state * log_f_t.exp()[..., :, None]
        if log_z_t is not None:
            state = state * log_z_t.exp()[..., None, :]
        # v_t - S' e_t
        written = v_t if e_t is None else v_t - _read(e_t, state)
        if beta_t is not None:
            written = beta_t[..., None] * written
        # S_t = S' + (beta_t (v_t - S' e_t)) k_t^T
        state = state + k_t[..., :, None] * written[..., None, :]
        outputs.append(_read(q_t, state))
    return (torch.stack(outputs, dim=1).to(v.dtype) if outputs else torch.zeros_like(v)), state


# Its rows. `recurrence` is another implementation of it, which then computes them; `options` are `initial_state` and
# `starts`.


def sum_rule(
    q: Tensor, k: Tensor, v: Tensor, *, recurrence: Recurrence = fast_weight_rule, **options: Tensor | None
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + v_t k_t^T (Schlag et al. 2021, Eq. 17; Mao 2022, Eq. 3)."""
    return recurrence(q, k, v, None, None, None, None, **options)


def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor,
    *,
    recurrence: Recurrence = fast_weight_rule,
    **options: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T (Peng et al. 2021; Mao 2022, Eq. 5)."""
    log_gate = log_gate.to(state_dtype(v.dtype))
    return recurrence(q, k, v, None, one_minus_gate(log_gate), log_gate, None, **options)


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    recurrence: Recurrence = fast_weight_rule,
    **options: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T (Mao 2022, Eq. 7), z the value decay and f the key decay."""
    return recurrence(q, k, v, None, None, log_key_decay, log_value_decay, **options)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    recurrence: Recurrence = fast_weight_rule,
    **options: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T (Schlag et al. 2021, Eq. 24), read after the write (Eq. 25)."""
    return recurrence(q, k, v, k, beta, None, None, **options)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_gate: Tensor,
    *,
    recurrence: Recurrence = fast_weight_rule,
    **options: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S_t = S' + beta_t (v_t - S' k_t) k_t^T, S' = S_{t-1} Diag(f_t) (Yang et al. 2025; per key: Kimi Team 2025)."""
    return recurrence(q, k, v, k, beta, log_gate, None, **options)


def ungrouped(x: Tensor, v: Tensor) -> Tensor:
    """`x` with as many heads as `v`, each of its own repeated for those that share it."""
    return x if x.shape[2] == v.shape[2] else x.repeat_interleave(v.shape[2] // x.shape[2], 2)


def _read(q_t: Tensor, state: Tensor) -> Tensor:
    """S_t q_t. Autocast runs matrix products in half precision: backwards too, where nothing here could stop it."""
    return (q_t[..., :, None] * state).sum(-2)


def _steps(dtype: torch.dtype, first: Tensor, *others: Tensor | None) -> list[Sequence[Any]]:
    """Each input's steps. Taking them apart at once, not by index, keeps the backward pass linear in time."""
    return [_each(None if x is None else x.to(dtype), first) for x in (first, *others)]


def _each(x: Tensor | None, like: Tensor) -> Sequence[Any]:
    return [None] * like.shape[1] if x is None else x.unbind(1)


ERASES = -1e4
"""A log decay whose exponential is 0 in every float type."""


def one_minus_gate(log_gate: Tensor) -> Tensor:
    """1 - g, with all digits of the value and of the gradient.

    1 - exp(x) loses the digits of the value for a gate near 1, -expm1(x), whose derivative autograd computes as
    expm1(x) + 1, those of the gradient for a gate near 0: each is taken where it is exact.
    """
    return torch.where(log_gate > -0.7, -torch.expm1(log_gate), 1 - torch.exp(log_gate))


def decay_at_starts(starts: Tensor, log_decay: Tensor | None, v: Tensor) -> Tensor:
    """Log decays that empty the state before the steps of `starts`.

    Args:
        starts: (batch, time), bool.
        log_decay: (batch, time, heads, any dim), None for no decay.
        v: (batch, time, heads, value_dim).

    Returns:
        Log decays of `log_decay`'s shape, or (batch, time, heads, 1).
    """
    if log_decay is None:
        log_decay = v.new_zeros(*v.shape[:3], 1, dtype=state_dtype(v.dtype))
    return torch.where(starts[..., None, None], log_decay.new_full((), ERASES), log_decay)
