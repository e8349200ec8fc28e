"""The diagonal family: S_t = (f_t z_t^T) * S_{t-1} + k_t v_t^T, y_t = S_t^T q_t; S is (key_dim, value_dim).

Without decays (the sum rule) the steps of a chunk are a causal matrix product. With decays, step s reaches step t > s
multiplied by the decays of all steps in (s, t]. To take exp(cumulative_t - cumulative_s) apart into a factor for t and
a factor for s would overflow; to take the difference first would need a (length, length, dim) tensor and would lose
the digits of mild decays next to extreme ones. So a chunk is halved again and again. In each block of 2h steps, with
m the last step of its first half, every t in the second half reads every s in the first half:

    y_t += exp(Pz_t) * sum_s <q_t exp(Pf_t), k_s exp(Rf_s)> v_s exp(Rz_s)
    P_t = sum of log decays in (m, t]        R_s = sum of log decays in (s, m]

Both are plain sums of numbers that are at most 0: no factor exceeds 1, nothing is subtracted. Each pair s < t meets in
exactly one block; the pairs s = t are left over and decay by nothing. The same two sums, taken over a whole chunk,
read the state at the chunk's start and write the state at its end.

The gradient of a log decay follows from the same sums: that of step u collects the products of every pair with
s < u <= t, again without a subtraction, which keeps it exact where decays are so strong that it almost vanishes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import state_dtype, without_autocast
from fairseq_fastweights.ops.chunkwise.chunks import (
    are_apart,
    chunk_length,
    decays_around_middle,
    exclusive_prefix_sums,
    exclusive_reverse,
    first_state,
    from_chunks,
    gradients_of,
    halves,
    inclusive,
    split,
    step_by_step,
    suffix_sums,
    times,
    times_lower,
    to_chunks,
)
from fairseq_fastweights.ops.kernels import differentiable_once


class DiagonalFunction(torch.autograd.Function):
    """(q, k, v, log_key_decay, log_value_decay, initial_state, starts) -> (out, final_state).

    log_key_decay is (batch, time, heads, key_dim or 1), log_value_decay (batch, time, heads, value_dim), either may
    be None; the former empties the state where `starts` is true.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *of_chunks, initial_state, _ = inputs
        v = inputs[2]
        with without_autocast(v):
            time = v.shape[1]
            qc, kc, vc, fc, zc = _chunks(*of_chunks)
            states = _states(kc, vc, fc, zc, first_state(initial_state, kc, vc))
            if fc is None and zc is None:
                out = times_lower((qc @ kc.transpose(-1, -2)).tril_(), vc)
            else:
                # The pairs s = t, which do not decay.
                out = (qc * kc).sum(-1, keepdim=True) * vc
                for half in halves(qc.shape[-2]):
                    (_, q2), (k1, _), (v1, _) = (split(x, half) for x in (qc, kc, vc))
                    (_, p_f), (r_f, _) = decays_around_middle(fc, half)
                    (_, p_z), (r_z, _) = decays_around_middle(zc, half)
                    # <q_t exp(P_t), k_s exp(R_s)> for t in the second half, s in the first
                    scores = times(q2, p_f) @ times(k1, r_f).transpose(-1, -2)
                    split(out, half)[1].add_(times(scores @ times(v1, r_z), p_z))
            inside_f, inside_z = inclusive(fc), inclusive(zc)
            # The state at the chunk's start, decayed to each step.
            out += times(times(qc, inside_f) @ states[:, :, :-1], inside_z)
        ctx.save_for_backward(*inputs, states)
        # The last state is returned as a copy: a caller may change it in place, and the saved states must stay.
        return from_chunks(out, time, v.dtype), states[:, :, -1].clone()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Any, d_out: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, initial_state, starts, states = saved
        if starts is not None and not are_apart(starts, (d_out, d_final)):

            def run(q: Tensor, k: Tensor, v: Tensor, f: Any, z: Any, state: Any) -> Any:
                return step_by_step(q, k, v, None, None, f, z, state, starts)

            return *gradients_of(run, (*inputs, initial_state), (d_out, d_final)), None
        v = inputs[2]
        with without_autocast(v):
            time = v.shape[1]
            qc, kc, vc, fc, zc = _chunks(*inputs)
            dyc = to_chunks(d_out.to(v.dtype), qc.shape[-2])
            df = None if fc is None else torch.zeros_like(fc)
            dz = None if zc is None else torch.zeros_like(zc)
            if fc is None and zc is None:
                scores = (qc @ kc.transpose(-1, -2)).tril_()
                d_scores = (dyc @ vc.transpose(-1, -2)).tril_()
                dq, dk = times_lower(d_scores, kc), d_scores.transpose(-1, -2) @ qc
                dv = scores.transpose(-1, -2) @ dyc
            else:
                own = (dyc * vc).sum(-1, keepdim=True)
                dq, dk, dv = own * kc, own * qc, (qc * kc).sum(-1, keepdim=True) * dyc
                for half in halves(qc.shape[-2]):
                    _add_block_gradients(half, (qc, kc, vc, fc, zc, dyc), (dq, dk, dv, df, dz))
            d_states = _add_state_gradients(states, d_final, (qc, kc, vc, fc, zc, dyc), (dq, dk, dv, df, dz))
        found = zip((dq, dk, dv, df, dz), inputs, ctx.needs_input_grad, strict=False)
        gradients = [from_chunks(x, time, of.dtype) if x is not None and wanted else None for x, of, wanted in found]
        return *gradients, d_states if ctx.needs_input_grad[5] else None, None


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    length = chunk_length(v.shape[1])
    dtype = state_dtype(v.dtype)
    fc, zc = (None if x is None else to_chunks(x.to(dtype), length) for x in (f, z))
    return to_chunks(q, length), to_chunks(k, length), to_chunks(v, length), fc, zc


def _states(k: Tensor, v: Tensor, f: Tensor | None, z: Tensor | None, first: Tensor) -> Tensor:
    """The state at the start of every chunk and after the last: (batch, heads, chunks + 1, key_dim, value_dim)."""
    # The addition of a chunk to the state: k_s v_s^T, decayed to its end.
    written = times(k, exclusive_reverse(f)).transpose(-1, -2) @ times(v, exclusive_reverse(z))
    states = [first]
    for n in range(k.shape[2]):
        states.append(_through_chunk(states[-1], f, z, n) + written[:, :, n])
    return torch.stack(states, dim=2)


def _through_chunk(state: Tensor, f: Tensor | None, z: Tensor | None, n: int | slice = slice(None)) -> Tensor:
    """A state after the decays of chunk n, or of each chunk; likewise a gradient on its way back."""
    # A product of decays is the exponential of a sum of their logs.
    if f is not None:
        state = state * f[:, :, n].sum(-2).exp()[..., :, None]
    if z is not None:
        state = state * z[:, :, n].sum(-2).exp()[..., None, :]
    return state


def _add_block_gradients(half: int, inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
    """Adds to each gradient the pairs of a query in the second half of a block and a key in its first, in place."""
    q, k, v, f, z, dy = inputs
    dq, dk, dv, df, dz = gradients
    assert q is not None and k is not None and v is not None and dy is not None
    assert dq is not None and dk is not None and dv is not None
    (_, q2), (k1, _), (v1, _), (_, dy2) = (split(x, half) for x in (q, k, v, dy))
    (_, p_f), (r_f, _) = decays_around_middle(f, half)
    (_, p_z), (r_z, _) = decays_around_middle(z, half)
    q2, k1, v1, dy2 = times(q2, p_f), times(k1, r_f), times(v1, r_z), times(dy2, p_z)
    scores = q2 @ k1.transpose(-1, -2)
    # Gradients of scores = q2 k1^T and out = scores v1.
    d_scores = dy2 @ v1.transpose(-1, -2)
    dq2, dk1, dv1 = d_scores @ k1, d_scores.transpose(-1, -2) @ q2, scores.transpose(-1, -2) @ dy2
    split(dq, half)[1].add_(times(dq2, p_f))
    split(dk, half)[0].add_(times(dk1, r_f))
    split(dv, half)[0].add_(times(dv1, r_z))
    if df is not None:
        first, second = split(df, half)
        # A decay of step u is in all pairs s < u <= t: sums over later queries, and over earlier keys.
        second += suffix_sums(_fold(dq2 * q2, df))
        first += exclusive_prefix_sums(_fold(dk1 * k1, df))
    if dz is not None:
        first, second = split(dz, half)
        second += suffix_sums(_fold((scores @ v1) * dy2, dz))
        first += exclusive_prefix_sums(_fold(dv1 * v1, dz))


def _add_state_gradients(
    states: Tensor, d_final: Tensor, inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]
) -> Tensor:
    """Adds to each gradient the part through the states at chunks' starts; returns the initial state's gradient."""
    q, k, v, f, z, dy = inputs
    dq, dk, dv, df, dz = gradients
    assert q is not None and k is not None and v is not None and dy is not None
    assert dq is not None and dk is not None and dv is not None
    in_f, in_z, out_f, out_z = inclusive(f), inclusive(z), exclusive_reverse(f), exclusive_reverse(z)
    q, k, v, dy = times(q, in_f), times(k, out_f), times(v, out_z), times(dy, in_z)
    read = q.transpose(-1, -2) @ dy
    d_state = d_final.to(q.dtype)
    d_ends: list[Tensor] = []
    for n in reversed(range(q.shape[2])):
        d_ends.append(d_state)
        d_state = _through_chunk(d_state, f, z, n) + read[:, :, n]
    starts = states[:, :, :-1]
    d_end = torch.stack(d_ends[::-1], dim=2)
    dq2, dk1, dv1 = dy @ starts.transpose(-1, -2), v @ d_end.transpose(-1, -2), k @ d_end
    dq += times(dq2, in_f)
    dk += times(dk1, out_f)
    dv += times(dv1, out_z)
    if df is not None or dz is not None:
        # The state that passes through the whole chunk meets every decay.
        passing = _through_chunk(starts * d_end, f, z)
    if df is not None:
        df += suffix_sums(_fold(dq2 * q, df)) + exclusive_prefix_sums(_fold(dk1 * k, df))
        df += _fold(passing.sum(-1)[..., None, :], df)
    if dz is not None:
        dz += suffix_sums(_fold((q @ starts) * dy, dz)) + exclusive_prefix_sums(_fold(dv1 * v, dz))
        dz += passing.sum(-2)[..., None, :]
    return d_state


def _fold(x: Tensor, like: Tensor) -> Tensor:
    """Sums over a last dimension that `like` shares."""
    return x.sum(-1, keepdim=True) if like.shape[-1] == 1 else x
