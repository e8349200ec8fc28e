"""Chunk-parallel implementations in plain PyTorch, for any device, with backward passes of their own.

A sequence is cut into chunks. Within a chunk all steps are computed at once by matrix products; from chunk to chunk
only the state is handed on. Between forward and backward pass nothing is kept but the inputs and the state at each
chunk's start; the states within a chunk are never formed, in either direction, but for those of the selective scan,
which are as many numbers as a chunk's steps have.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_fastweights.ops import reference
from fairseq_fastweights.ops.checks import state_dtype
from fairseq_fastweights.ops.chunkwise.delta import DeltaFunction
from fairseq_fastweights.ops.chunkwise.diagonal import DiagonalFunction
from fairseq_fastweights.ops.chunkwise.layout import LONGEST_CHUNK
from fairseq_fastweights.ops.chunkwise.scan import ScanFunction
from fairseq_fastweights.ops.gates import decay_at_starts, one_minus_gate
from fairseq_fastweights.ops.reference import ungrouped


def sum_rule(
    q: Tensor, k: Tensor, v: Tensor, *, initial_state: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + v_t k_t^T."""
    return decay_rule(q, k, v, None, None, initial_state=initial_state, starts=starts)


def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T: a key decay that all key dimensions share."""
    log_gate = log_gate[..., None].to(state_dtype(v.dtype))
    k = ungrouped(k, v).to(log_gate.dtype) * one_minus_gate(log_gate)
    return decay_rule(q, k, v, log_gate, None, initial_state=initial_state, starts=starts)


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T."""
    if starts is not None:
        log_key_decay = decay_at_starts(starts, log_key_decay, v)
    q, k = ungrouped(q, v), ungrouped(k, v)
    return DiagonalFunction.apply(q, k, v, log_key_decay, log_value_decay, initial_state)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T."""
    return _correct(q, k, v, None, beta, None, initial_state, starts)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_gate: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S' + beta_t (v_t - S' k_t) k_t^T, S' = S_{t-1} Diag(f_t)."""
    return _correct(q, k, v, None, beta, log_gate, initial_state, starts)


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
    """S_t = S' + beta_t (v_t - S' e_t) k_t^T, S' = (z_t f_t^T) * S_{t-1}.

    With e_t and z_t no two steps commute, and a chunk has no form in matrices: the steps are taken one after the other,
    and those of a chunk again for its gradient.
    """
    if erase is not None and log_value_decay is None:
        return _correct(q, k, v, None if erase is k else erase, beta, log_key_decay, initial_state, starts)
    if erase is None:
        if beta is not None:
            k = ungrouped(k, v).to(state_dtype(v.dtype)) * beta[..., None]
        if log_key_decay is not None and log_key_decay.dim() == 3:
            log_key_decay = log_key_decay[..., None]
        return decay_rule(q, k, v, log_key_decay, log_value_decay, initial_state=initial_state, starts=starts)
    outputs, state = [], initial_state
    inputs = (q, k, v, erase, beta, log_key_decay, log_value_decay)
    for t in range(0, v.shape[1], LONGEST_CHUNK):
        part = (None if x is None else x[:, t : t + LONGEST_CHUNK] for x in (starts, *inputs))
        first, *chunk = part
        out, state = checkpoint(
            reference.fast_weight_rule, *chunk, initial_state=state, starts=first, use_reentrant=False
        )
        outputs.append(out)
    assert state is not None
    return torch.cat(outputs, 1), state


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
    """h_t = exp(delta_t A) * h_{t-1} + (delta_t * u_t) B_t^T, of which a chunk's states are formed together."""
    return ScanFunction.apply(u, delta, A, B, C, D, initial_state)


def _correct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor | None,
    beta: Tensor | None,
    log_key_decay: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if log_key_decay is not None and log_key_decay.dim() == 3:
        log_key_decay = log_key_decay[..., None]
    if starts is not None:
        log_key_decay = decay_at_starts(starts, log_key_decay, v)
    q, k = ungrouped(q, v), ungrouped(k, v)
    erase = None if erase is None else ungrouped(erase, v)
    return DeltaFunction.apply(q, k, v, erase, beta, log_key_decay, initial_state)
