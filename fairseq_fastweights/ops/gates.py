"""Turns the gates of rules into the parts of the one recurrence, whatever computes that."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import state_dtype

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
