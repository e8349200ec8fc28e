"""The delta family: S_t = S_{t-1} + k_t u_t^T with u_t = beta_t (v_t - S_{t-1}^T k_t), y_t = S_t^T q_t.

Within a chunk that starts from S_0, u_t = beta_t (v_t - S_0^T k_t - sum_{s<t} <k_t, k_s> u_s). With the steps as rows,
B = diag(beta) and A the part of B K K^T below the diagonal, this is a triangular system (the WY form of a product of
Householder-like factors; Bischof & Van Loan 1987):

    (I + A) U = B (V - K S_0)              U = Uv - W S_0,  Uv = (I + A)^-1 B V,  W = (I + A)^-1 B K
    Y = Q S_0 + tril(Q K^T) U              S_end = S_0 + K^T U

Uv and W need no state, so all chunks are solved at once; from chunk to chunk only S_end is computed in turn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_fastweights.ops.autocast import without_autocast
from fairseq_fastweights.ops.checks import state_dtype
from fairseq_fastweights.ops.chunkwise.layout import (
    chunk_length,
    first_state,
    from_chunks,
    to_chunks,
)


class DeltaFunction(torch.autograd.Function):
    """(q, k, v, beta, initial_state) -> (out, final_state)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(v):
            qc, kc, vc, bc = _chunks(q, k, v, beta)
            system = _system(kc, bc)
            state = first_state(initial_state, kc, vc)
            scores = (qc @ kc.transpose(-1, -2)).tril_()
            if initial_state is None and kc.shape[2] == 1:
                # A single chunk that starts from nothing, as in sliding windows: U = Uv, and W is not needed.
                (u,) = _solve(system, bc * vc)
                out = scores @ u
                stacked = torch.stack([state, (kc.transpose(-1, -2) @ u)[:, :, 0]], dim=2)
            else:
                uv, w = _solve(system, bc * vc, bc * kc)
                states = [state]
                for n in range(kc.shape[2]):
                    u = uv[:, :, n] - w[:, :, n] @ states[-1]
                    states.append(states[-1] + kc[:, :, n].transpose(-1, -2) @ u)
                stacked = torch.stack(states, dim=2)
                starts = stacked[:, :, :-1]
                out = qc @ starts + scores @ (uv - w @ starts)
        ctx.save_for_backward(q, k, v, beta, stacked)
        return from_chunks(out, v.shape[1], v.dtype), stacked[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, states = ctx.saved_tensors
        with without_autocast(v):
            qc, kc, vc, bc = _chunks(q, k, v, beta)
            dy = to_chunks(d_out.to(v.dtype), qc.shape[-2])
            starts = states[:, :, :-1]
            keys_t = kc.transpose(-1, -2)
            system = _system(kc, bc)
            uv, w = _solve(system, bc * vc, bc * kc)
            u = uv - w @ starts
            scores = (qc @ keys_t).tril_()

            # d S_0 = d S_end + Q^T dY - W^T dU with dU = tril(QK^T)^T dY + K d S_end, chunk by chunk from the last.
            du_inside = scores.transpose(-1, -2) @ dy
            direct = qc.transpose(-1, -2) @ dy - w.transpose(-1, -2) @ du_inside
            d_state = d_final.to(qc.dtype)
            d_ends: list[Tensor] = []
            for n in reversed(range(qc.shape[2])):
                d_ends.append(d_state)
                back = w[:, :, n].transpose(-1, -2) @ (kc[:, :, n] @ d_state)
                d_state = d_state + direct[:, :, n] - back
            d_end = torch.stack(d_ends[::-1], dim=2)

            du = du_inside + kc @ d_end
            # (I + A) U = R: dR = (I + A)^-T dU, dA = -dR U^T below the diagonal.
            d_right = torch.linalg.solve_triangular(system.transpose(-1, -2), du, upper=True, unitriangular=True)
            d_system = -(d_right @ u.transpose(-1, -2)).tril_(-1)
            d_scores = (dy @ u.transpose(-1, -2)).tril_()
            error = vc - kc @ starts
            dq = dy @ starts.transpose(-1, -2) + d_scores @ kc
            dv = bc * d_right
            d_products = bc * d_system
            dk = (
                d_scores.transpose(-1, -2) @ qc
                + u @ d_end.transpose(-1, -2)
                + d_products @ kc
                + d_products.transpose(-1, -2) @ kc
                - dv @ starts.transpose(-1, -2)
            )
            db = (d_right * error).sum(-1, keepdim=True)
            db += (d_system * (kc @ keys_t)).sum(-1, keepdim=True)
        gradients: list[Tensor | None] = []
        for gradient, source in ((dq, q), (dk, k), (dv, v), (db, beta)):
            wanted = ctx.needs_input_grad[len(gradients)]
            gradients.append(from_chunks(gradient, v.shape[1], source.dtype) if wanted else None)
        if gradients[3] is not None:
            gradients[3] = gradients[3].squeeze(-1)
        gradients.append(d_state if ctx.needs_input_grad[4] else None)
        return tuple(gradients)


def _chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length = chunk_length(v.shape[1])
    strength = beta[..., None].to(state_dtype(v.dtype))
    return (
        to_chunks(q, length),
        to_chunks(k, length),
        to_chunks(v, length),
        to_chunks(strength, length),
    )


def _system(k: Tensor, beta: Tensor) -> Tensor:
    """A, strictly lower triangular; the solver supplies the diagonal of ones."""
    return (beta * (k @ k.transpose(-1, -2))).tril_(-1)


def _solve(system: Tensor, *right: Tensor) -> tuple[Tensor, ...]:
    solved = torch.linalg.solve_triangular(system, torch.cat(right, dim=-1), upper=False, unitriangular=True)
    return solved.split([r.shape[-1] for r in right], dim=-1)
