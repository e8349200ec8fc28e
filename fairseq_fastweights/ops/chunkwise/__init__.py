"""Chunk-parallel implementations in plain PyTorch, for any device, with backward passes of their own.

A sequence is cut into chunks. Within a chunk all steps are computed at once by matrix products; from chunk to chunk
only the state is handed on. Between forward and backward pass nothing is kept but the inputs and the state at each
chunk's start; the states within a chunk are never formed, in either direction. An erase key beside decays of values has
no such form and goes step by step.
"""

from __future__ import annotations

from torch import Tensor

from fairseq_fastweights.ops.checks import state_dtype
from fairseq_fastweights.ops.chunkwise.chunks import are_apart, step_by_step
from fairseq_fastweights.ops.chunkwise.delta import DeltaFunction
from fairseq_fastweights.ops.chunkwise.diagonal import DiagonalFunction
from fairseq_fastweights.ops.reference import decay_at_starts, ungrouped


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
    """S_t = S' + beta_t (v_t - S' e_t) k_t^T, S' = (z_t f_t^T) * S_{t-1}: the recurrence that all rules are rows of."""
    decays = log_key_decay, log_value_decay
    # An erase key with decays of values has no form in matrices.
    if (erase is not None and log_value_decay is not None) or not are_apart(
        starts, (q, k, v, erase, beta, initial_state), decays
    ):
        return step_by_step(q, k, v, erase, beta, log_key_decay, log_value_decay, initial_state, starts)
    if log_key_decay is not None and log_key_decay.dim() == 3:
        log_key_decay = log_key_decay[..., None]
    if starts is not None:
        log_key_decay = decay_at_starts(starts, log_key_decay, v)
    other_key = None if erase is None or erase is k else ungrouped(erase, v)
    q, k = ungrouped(q, v), ungrouped(k, v)
    if erase is not None:
        return DeltaFunction.apply(q, k, v, other_key, beta, log_key_decay, initial_state, starts)
    if beta is not None:
        k = k.to(state_dtype(v.dtype)) * beta[..., None]
    return DiagonalFunction.apply(q, k, v, log_key_decay, log_value_decay, initial_state, starts)
