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
from torch.autograd.function import once_differentiable

from fairseq_fastweights.ops.autocast import without_autocast
from fairseq_fastweights.ops.checks import state_dtype
from fairseq_fastweights.ops.chunkwise.layout import (
    chunk_length,
    first_state,
    from_chunks,
    to_chunks,
)


class DiagonalFunction(torch.autograd.Function):
    """(q, k, v, log_key_decay, log_value_decay, initial_state, gated) -> (out, final_state).

    log_key_decay is (batch, time, heads, key_dim or 1), log_value_decay (batch, time, heads, value_dim), either may
    be None. `gated` writes with 1 - exp(log_key_decay), which is then the same for all key dimensions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_key_decay: Tensor | None,
        log_value_decay: Tensor | None,
        initial_state: Tensor | None,
        gated: bool,
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(v):
            time = v.shape[1]
            qc, kc, vc, fc, zc = _chunks(q, k, v, log_key_decay, log_value_decay)
            if gated:
                assert fc is not None
                kc = kc * -torch.expm1(fc)
            states = _states(kc, vc, fc, zc, first_state(initial_state, kc, vc))
            if fc is None and zc is None:
                out = (qc @ kc.transpose(-1, -2)).tril_() @ vc
            else:
                out = (qc * kc).sum(-1, keepdim=True) * vc
                for half in _halves(qc.shape[-2]):
                    (_, q2), (k1, _), (v1, _) = (_split(x, half) for x in (qc, kc, vc))
                    (_, p_f), (r_f, _) = _decays_around_middle(fc, half)
                    (_, p_z), (r_z, _) = _decays_around_middle(zc, half)
                    scores = _times(q2, p_f) @ _times(k1, r_f).transpose(-1, -2)
                    _split(out, half)[1].add_(_times(scores @ _times(v1, r_z), p_z))
            inside_f, inside_z = _inclusive(fc), _inclusive(zc)
            out += _times(_times(qc, inside_f) @ states[:, :, :-1], inside_z)
        ctx.save_for_backward(q, k, v, log_key_decay, log_value_decay, states)
        ctx.gated = gated
        # The last state is handed out as a copy: what is saved must not change with it.
        return from_chunks(out, time, v.dtype), states[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_key_decay, log_value_decay, states = ctx.saved_tensors
        with without_autocast(v):
            time = v.shape[1]
            qc, kc, vc, fc, zc = _chunks(q, k, v, log_key_decay, log_value_decay)
            dyc = to_chunks(d_out.to(v.dtype), qc.shape[-2])
            keys = kc
            if ctx.gated:
                assert fc is not None
                kc = keys * -torch.expm1(fc)
            df = None if fc is None else torch.zeros_like(fc)
            dz = None if zc is None else torch.zeros_like(zc)
            if fc is None and zc is None:
                scores = (qc @ kc.transpose(-1, -2)).tril_()
                d_scores = (dyc @ vc.transpose(-1, -2)).tril_()
                dq, dk, dv = (
                    d_scores @ kc,
                    d_scores.transpose(-1, -2) @ qc,
                    scores.transpose(-1, -2) @ dyc,
                )
            else:
                own = (dyc * vc).sum(-1, keepdim=True)
                dq, dk, dv = own * kc, own * qc, (qc * kc).sum(-1, keepdim=True) * dyc
                for half in _halves(qc.shape[-2]):
                    _add_block_gradients(half, (qc, kc, vc, fc, zc, dyc), (dq, dk, dv, df, dz))
            d_states = _add_state_gradients(states, d_final, (qc, kc, vc, fc, zc, dyc), (dq, dk, dv, df, dz))
            if ctx.gated:
                assert fc is not None and df is not None
                # k_t (1 - g_t): the gate's gradient through the write, d(1 - g)/d log g = -g.
                df -= (dk * keys).sum(-1, keepdim=True) * torch.exp(fc)
                dk = dk * -torch.expm1(fc)
        gradients: list[Tensor | None] = []
        for gradient, source in (
            (dq, q),
            (dk, k),
            (dv, v),
            (df, log_key_decay),
            (dz, log_value_decay),
        ):
            if gradient is None or not ctx.needs_input_grad[len(gradients)]:
                gradients.append(None)
            else:
                gradients.append(from_chunks(gradient, time, source.dtype))
        gradients.append(d_states if ctx.needs_input_grad[5] else None)
        return (*gradients, None)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    length = chunk_length(v.shape[1])
    dtype = state_dtype(v.dtype)
    fc, zc = (None if x is None else to_chunks(x.to(dtype), length) for x in (f, z))
    return to_chunks(q, length), to_chunks(k, length), to_chunks(v, length), fc, zc


def _states(k: Tensor, v: Tensor, f: Tensor | None, z: Tensor | None, first: Tensor) -> Tensor:
    """The state at the start of every chunk and after the last: (batch, heads, chunks + 1, key_dim, value_dim)."""
    written = _times(k, _exclusive_reverse(f)).transpose(-1, -2) @ _times(v, _exclusive_reverse(z))
    states = [first]
    for n in range(k.shape[2]):
        states.append(_through_chunk(states[-1], f, z, n) + written[:, :, n])
    return torch.stack(states, dim=2)


def _through_chunk(state: Tensor, f: Tensor | None, z: Tensor | None, n: int) -> Tensor:
    """What the decays of chunk n leave of a state, or of a gradient on its way back."""
    if f is not None:
        state = state * f[:, :, n].sum(-2).exp()[..., :, None]
    if z is not None:
        state = state * z[:, :, n].sum(-2).exp()[..., None, :]
    return state


def _add_block_gradients(half: int, inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
    """Adds what the second half of each block, reading the first, contributes to each gradient, in place."""
    q, k, v, f, z, dy = inputs
    dq, dk, dv, df, dz = gradients
    assert q is not None and k is not None and v is not None and dy is not None
    assert dq is not None and dk is not None and dv is not None
    (_, q2), (k1, _), (v1, _), (_, dy2) = (_split(x, half) for x in (q, k, v, dy))
    (_, p_f), (r_f, _) = _decays_around_middle(f, half)
    (_, p_z), (r_z, _) = _decays_around_middle(z, half)
    q2, k1, v1, dy2 = _times(q2, p_f), _times(k1, r_f), _times(v1, r_z), _times(dy2, p_z)
    scores = q2 @ k1.transpose(-1, -2)
    d_scores = dy2 @ v1.transpose(-1, -2)
    dq2, dk1, dv1 = (
        d_scores @ k1,
        d_scores.transpose(-1, -2) @ q2,
        scores.transpose(-1, -2) @ dy2,
    )
    _split(dq, half)[1].add_(_times(dq2, p_f))
    _split(dk, half)[0].add_(_times(dk1, r_f))
    _split(dv, half)[0].add_(_times(dv1, r_z))
    if df is not None:
        first, second = _split(df, half)
        second += _suffix_sums(_fold(dq2 * q2, df))
        first += _exclusive_prefix_sums(_fold(dk1 * k1, df))
    if dz is not None:
        first, second = _split(dz, half)
        second += _suffix_sums(_fold((scores @ v1) * dy2, dz))
        first += _exclusive_prefix_sums(_fold(dv1 * v1, dz))


def _add_state_gradients(
    states: Tensor,
    d_final: Tensor,
    inputs: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
) -> Tensor:
    """Adds what runs through the states at the chunks' starts, in place; returns the initial state's gradient."""
    q, k, v, f, z, dy = inputs
    dq, dk, dv, df, dz = gradients
    assert q is not None and k is not None and v is not None and dy is not None
    assert dq is not None and dk is not None and dv is not None
    in_f, in_z, out_f, out_z = (
        _inclusive(f),
        _inclusive(z),
        _exclusive_reverse(f),
        _exclusive_reverse(z),
    )
    q, k, v, dy = _times(q, in_f), _times(k, out_f), _times(v, out_z), _times(dy, in_z)
    read = q.transpose(-1, -2) @ dy
    d_state = d_final.to(q.dtype)
    d_ends: list[Tensor] = []
    for n in reversed(range(q.shape[2])):
        d_ends.append(d_state)
        d_state = _through_chunk(d_state, f, z, n) + read[:, :, n]
    starts = states[:, :, :-1]
    d_end = torch.stack(d_ends[::-1], dim=2)
    dq2, dk1, dv1 = dy @ starts.transpose(-1, -2), v @ d_end.transpose(-1, -2), k @ d_end
    dq += _times(dq2, in_f)
    dk += _times(dk1, out_f)
    dv += _times(dv1, out_z)
    if df is not None or dz is not None:
        passing = starts * d_end
        if f is not None:
            passing = passing * f.sum(-2).exp()[..., :, None]
        if z is not None:
            passing = passing * z.sum(-2).exp()[..., None, :]
    if df is not None:
        df += _suffix_sums(_fold(dq2 * q, df)) + _exclusive_prefix_sums(_fold(dk1 * k, df))
        df += _fold(passing.sum(-1)[..., None, :], df)
    if dz is not None:
        dz += _suffix_sums(_fold((q @ starts) * dy, dz)) + _exclusive_prefix_sums(_fold(dv1 * v, dz))
        dz += passing.sum(-2)[..., None, :]
    return d_state


def _halves(length: int) -> list[int]:
    """1, 2, 4, ... up to half of `length`, a power of two."""
    return [1 << i for i in range(length.bit_length() - 1)]


def _split(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Views of the first and second halves of the blocks of 2 * half steps: (..., blocks, half, dim) each."""
    *others, length, dim = x.shape
    blocks = x.view(*others, length // (2 * half), 2, half, dim)
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _decays_around_middle(
    log_decay: Tensor | None, half: int
) -> tuple[tuple[None, Tensor | None], tuple[Tensor | None, None]]:
    """Factors from each block's middle to the steps after it, and from the steps before it to the middle."""
    if log_decay is None:
        return (None, None), (None, None)
    first, second = _split(log_decay, half)
    return (None, second.cumsum(-2).exp()), (_exclusive_suffix_sums(first).exp(), None)


def _inclusive(log_decay: Tensor | None) -> Tensor | None:
    """Factors from a chunk's start to each of its steps."""
    return None if log_decay is None else log_decay.cumsum(-2).exp()


def _exclusive_reverse(log_decay: Tensor | None) -> Tensor | None:
    """Factors from each step to its chunk's end."""
    return None if log_decay is None else _exclusive_suffix_sums(log_decay).exp()


def _suffix_sums(x: Tensor) -> Tensor:
    return x.flip(-2).cumsum(-2).flip(-2)


def _exclusive_suffix_sums(x: Tensor) -> Tensor:
    """Sums over all later steps; shifted rather than subtracted, to keep the digits of small terms."""
    return torch.cat([_suffix_sums(x[..., 1:, :]), torch.zeros_like(x[..., :1, :])], dim=-2)


def _exclusive_prefix_sums(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :].cumsum(-2)], dim=-2)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _fold(x: Tensor, like: Tensor) -> Tensor:
    """Sums over a last dimension that `like` shares."""
    return x.sum(-1, keepdim=True) if like.shape[-1] == 1 else x
