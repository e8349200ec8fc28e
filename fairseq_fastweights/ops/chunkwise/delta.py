"""The delta family: S_t = S' + k_t u_t^T, u_t = beta_t (v_t - S'^T e_t), S' = Diag(f_t) S_{t-1}, y_t = S_t^T q_t.

Within a chunk that starts from S, with the steps as rows, P the decays from the chunk's start to each step, R those
from each step to its end, and <a_t, b_s> products with the decays of (s, t] between them, this is a triangular system
(the WY form of a product of Householder-like factors; Bischof & Van Loan 1987; with decays, Yang et al. 2025):

    (I + A) U = B (V - (E * P) S)          A_ts = beta_t <e_t, k_s> for s < t,  B = diag(beta)
    Y = (Q * P) S + <Q, K> U               S_end = Diag(P_end) S + (K * R)^T U

U = Uv - W S, and Uv = (I + A)^-1 B V and W = (I + A)^-1 B (E * P) need no state: they are made for all chunks at once,
and differentiated by autograd. From chunk to chunk only the state is computed in turn, and its gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import state_dtype, without_autocast
from fairseq_fastweights.ops.chunkwise.chunks import (
    are_apart,
    chunk_length,
    exclusive_reverse,
    first_state,
    from_chunks,
    gradients_of,
    inclusive,
    scores,
    step_by_step,
    times,
    times_lower,
    to_chunks,
)
from fairseq_fastweights.ops.kernels import differentiable_once


class DeltaFunction(torch.autograd.Function):
    """(q, k, v, erase, beta, log_key_decay, initial_state, starts) -> (out, final_state).

    erase and beta may be None, for k and for 1; log_key_decay too, or (batch, time, heads, key_dim or 1), which empties
    the state where `starts` is true.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *of_chunks, initial_state, _ = inputs
        v = inputs[2]
        with without_autocast(v):
            chunks = _prepare(*of_chunks)
            states = [first_state(initial_state, chunks.writes, chunks.uv)]
            for n in range(chunks.uv.shape[2]):
                # U = Uv - W S
                u = chunks.uv[:, :, n] - chunks.w[:, :, n] @ states[-1]
                kept = states[-1] if chunks.total is None else chunks.total[:, :, n] * states[-1]
                # S_end = Diag(P_end) S + (K * R)^T U
                states.append(kept + chunks.writes[:, :, n].transpose(-1, -2) @ u)
            stacked = torch.stack(states, dim=2)
            entering = stacked[:, :, :-1]
            # Y = (Q * P) S + <Q, K> U, for all chunks at once
            out = chunks.reads @ entering + times_lower(chunks.scores, chunks.uv - chunks.w @ entering)
        ctx.save_for_backward(*inputs, stacked)
        return from_chunks(out, v.shape[1], v.dtype), states[-1].clone()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Any, d_out: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, initial_state, starts, states = saved
        if starts is not None and not are_apart(starts, (d_out, d_final)):

            def run(q: Tensor, k: Tensor, v: Tensor, erase: Any, beta: Any, f: Any, state: Any) -> Any:
                return step_by_step(q, k, v, k if erase is None else erase, beta, f, None, state, starts)

            return *gradients_of(run, (*inputs, initial_state), (d_out, d_final)), None
        leaves: list[Any] = [
            None if x is None else x.detach().requires_grad_(wanted)
            for x, wanted in zip(inputs, ctx.needs_input_grad[:6], strict=True)
        ]
        v = inputs[2]
        with without_autocast(v), torch.enable_grad():
            # The parts without a state, again, for autograd to differentiate.
            chunks = _prepare(*leaves)
        with without_autocast(v):
            uv, w, inside, reads, writes = (x.detach() for x in chunks[:5])
            total = None if chunks.total is None else chunks.total.detach()
            dy = to_chunks(d_out.to(v.dtype), uv.shape[-2])
            entering = states[:, :, :-1]
            u = uv - w @ entering
            # d S = reads^T dY + total * d S_end - W^T dU, dU = scores^T dY + writes d S_end, from the last chunk on.
            du_inside = inside.transpose(-1, -2) @ dy
            direct = reads.transpose(-1, -2) @ dy - w.transpose(-1, -2) @ du_inside
            d_state = d_final.to(states.dtype)
            d_ends: list[Tensor] = []
            for n in reversed(range(uv.shape[2])):
                d_ends.append(d_state)
                back = w[:, :, n].transpose(-1, -2) @ (writes[:, :, n] @ d_state)
                d_state = (d_state if total is None else total[:, :, n] * d_state) + direct[:, :, n] - back
            d_end = torch.stack(d_ends[::-1], dim=2)
            du = du_inside + writes @ d_end
            gradients = _Chunks(
                uv=du,
                w=-du @ entering.transpose(-1, -2),
                scores=dy @ u.transpose(-1, -2),
                reads=dy @ entering.transpose(-1, -2),
                writes=u @ d_end.transpose(-1, -2),
                total=None if total is None else (entering * d_end).sum(-1, keepdim=True).sum_to_size(total.shape),
            )
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            through = [(x, g) for x, g in zip(chunks, gradients, strict=True) if x is not None and x.requires_grad]
            outputs, cotangents = zip(*through, strict=True) if wanted else ((), ())
            found = iter(torch.autograd.grad(outputs, wanted, cotangents) if wanted else ())
        of_inputs = [next(found) if x is not None and x.requires_grad else None for x in leaves]
        return *of_inputs, d_state if ctx.needs_input_grad[6] else None, None


class _Chunks(NamedTuple):
    """The parts of a sequence that need no state: (batch, heads, chunks, ...) each; names as at the page's top."""

    uv: Tensor
    w: Tensor
    scores: Tensor  # <Q, K>
    reads: Tensor  # Q * P
    writes: Tensor  # K * R
    total: Tensor | None  # P_end, (..., key_dim or 1, 1); None without decays


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor | None, beta: Tensor | None, log_key_decay: Tensor | None
) -> _Chunks:
    length = chunk_length(v.shape[1])
    qc, kc, vc = (to_chunks(x, length) for x in (q, k, v))
    ec = kc if erase is None else to_chunks(erase, length)
    fc = None if log_key_decay is None else to_chunks(log_key_decay.to(state_dtype(v.dtype)), length)
    entering, leaving = inclusive(fc), exclusive_reverse(fc)
    # (I + A) [Uv, W] = B [V, E * P]
    system, right, reading = scores(ec, kc, fc), vc, times(ec, entering)
    if beta is not None:
        strength = to_chunks(beta[..., None].to(state_dtype(v.dtype)), length)
        system, right, reading = strength * system, strength * right, strength * reading
    # The solver reads the part below the diagonal, and assumes ones on it.
    solved = torch.linalg.solve_triangular(
        system.tril(-1), torch.cat([right, reading], -1), upper=False, unitriangular=True
    )
    uv, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    total = None if fc is None else fc.sum(-2).exp()[..., None]
    return _Chunks(uv, w, scores(qc, kc, fc), times(qc, entering), times(kc, leaving), total)
