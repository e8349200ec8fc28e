"""Chunk-parallel implementations in plain PyTorch, for any device, with backward passes of their own.

A sequence is cut into chunks. Within a chunk all steps are computed at once by matrix products; from chunk to chunk
only the state is handed on. Between forward and backward pass nothing is kept but the inputs and the state at each
chunk's start; the states within a chunk are never formed, in either direction, but for those of the selective scan,
which are as many numbers as a chunk's steps have.
"""

from __future__ import annotations

from torch import Tensor

from fairseq_fastweights.ops.chunkwise.delta import DeltaFunction
from fairseq_fastweights.ops.chunkwise.diagonal import DiagonalFunction
from fairseq_fastweights.ops.chunkwise.scan import ScanFunction


def sum_rule(q: Tensor, k: Tensor, v: Tensor, *, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + v_t k_t^T."""
    return DiagonalFunction.apply(q, k, v, None, None, initial_state, False)


def gated_rule(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = g_t S_{t-1} + (1 - g_t) v_t k_t^T: a key decay that all key dimensions share."""
    return DiagonalFunction.apply(q, k, v, log_gate[..., None], None, initial_state, True)


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T."""
    return DiagonalFunction.apply(q, k, v, log_key_decay, log_value_decay, initial_state, False)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T."""
    return DeltaFunction.apply(q, k, v, beta, initial_state)


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
