"""The update rules one step at a time, as in the papers: every other implementation is compared with these.

All are rows of one recurrence, `fast_weight_rule`. The papers write the state as W or S of shape (value_dim, key_dim),
y = S q. Here, as in the rest of the package, the state is its transpose, (batch, heads, key_dim, value_dim), so that
S_t += v_t k_t^T reads ``state += outer(k_t, v_t)``. Gradients are those that autograd finds through the loop.
Everything is computed in float64 for float64 inputs and in float32 for all others, under autocast too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import state_dtype


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


class Row(NamedTuple):
    """A rule's gates as arguments of the recurrence, of which the rule is a row; a None is left out.

    Attributes:
        erase: e, (batch, time, heads of k, key_dim); None for k, if the rule corrects.
        corrects: whether the rule subtracts the value that it retrieves, or only adds.
        beta: (batch, time, heads).
        complement: whether beta is 1 - f, for log decays (batch, time, heads).
        log_key_decay: log f, (batch, time, heads) or (batch, time, heads, key_dim).
        log_value_decay: log z, (batch, time, heads, value_dim).
    """

    erase: Tensor | None = None
    corrects: bool = False
    beta: Tensor | None = None
    complement: bool = False
    log_key_decay: Tensor | None = None
    log_value_decay: Tensor | None = None


def run_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor | None,
    row: Callable[..., Row],
    recurrence: Callable[..., tuple[Tensor, Tensor]] = fast_weight_rule,
    **options: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes a rule by the recurrence, or by another implementation of it, with `initial_state` and `starts`."""
    erase, corrects, beta, complement, log_key_decay, log_value_decay = row(*gates)
    if corrects and erase is None:
        erase = k
    if complement:
        assert log_key_decay is not None
        log_key_decay = log_key_decay.to(state_dtype(v.dtype))
        beta = one_minus_gate(log_key_decay)
    return recurrence(q, k, v, erase, beta, log_key_decay, log_value_decay, **options)


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
