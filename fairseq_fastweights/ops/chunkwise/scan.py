"""The selective scan: h_t = a_t * h_{t-1} + w_t, a_t = exp(delta_t A), w_t = (delta_t u_t) B_t^T; y_t = h_t C_t.

The states of a chunk are formed all at once, those of no other chunk beside them. A chunk is put together out of
halves: where the states of two neighbouring blocks are known as if each had begun at zero, those of the second lack no
more than what the last state of the first leaves in them,

    h_t += p_t * h_m     p_t = a_{m+1} ... a_t, m the last step of the first block

and the products p are put together alike. No factor exceeds 1, nothing is divided or subtracted: where a product
vanishes it has nothing to say. The gradients of states, g_t = dy_t C_t^T + a_{t+1} * g_{t+1}, are the same recurrence
the other way around.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.ops.autocast import without_autocast
from fairseq_fastweights.ops.checks import state_dtype
from fairseq_fastweights.ops.chunkwise.layout import chunk_length
from fairseq_fastweights.ops.once import differentiable_once

# Steps whose states are formed together: on a CPU they should stay in its cache.
LONGEST_CHUNK_ON_CPU = 16


class ScanFunction(torch.autograd.Function):
    """(u, delta, A, B, C, D, initial_state) -> (out, final_state), for one step at least."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = state_dtype(u.dtype)
        with without_autocast(u):
            rates = A.to(dtype)
            state = u.new_zeros(u.shape[0], *A.shape, dtype=dtype) if initial_state is None else initial_state
            states, outputs = [state], []
            for u_c, delta_c, B_c, C_c in _chunks(u, delta, B, C):
                _, h = _states(u_c, delta_c, rates, B_c, states[-1])
                outputs.append((h @ C_c[..., None]).squeeze(-1))
                states.append(h[:, -1].clone())
            out = torch.cat(outputs, 1)[:, : u.shape[1]]
            if D is not None:
                out = out + D.to(dtype) * u.to(dtype)
        ctx.save_for_backward(u, delta, A, B, C, D, initial_state, torch.stack(states[:-1]))
        return out.to(u.dtype), states[-1]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Any, d_out: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        u, delta, A, B, C, D, _, states = saved
        dtype = state_dtype(u.dtype)
        with without_autocast(u):
            rates, dA, d_state = A.to(dtype), torch.zeros_like(A, dtype=dtype), d_final
            gradients: list[tuple[Tensor, ...]] = []
            chunks = zip(_chunks(u, delta, B, C, d_out), states, strict=True)
            for (u_c, delta_c, B_c, C_c, dy), start in reversed(list(chunks)):
                decay, h = _states(u_c, delta_c, rates, B_c, start)
                # What reaches a step from the one after it, times the decays in between.
                g = dy[..., None] * C_c[:, :, None, :]
                g[:, -1] += d_state
                _scan_(torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], 1), g, backwards=True)
                decay *= g  # the gradients of the states before
                d_state = decay[:, 0].clone()
                dC = (dy[:, :, None, :] @ h).squeeze(2)
                dB = ((delta_c * u_c)[:, :, None, :] @ g).squeeze(2)
                written = (g @ B_c[..., None]).squeeze(-1)
                decay[:, 0] *= start
                decay[:, 1:] *= h[:, :-1]
                d_delta = u_c * written + torch.einsum("btcn,cn->btc", decay, rates)
                dA += torch.einsum("btcn,btc->cn", decay, delta_c)
                gradients.append((delta_c * written, d_delta, dB, dC))
            time = u.shape[1]
            du, d_delta, dB, dC = (torch.cat(parts[::-1], 1)[:, :time] for parts in zip(*gradients, strict=True))
            dD = None
            if D is not None:
                du += D.to(dtype) * d_out.to(dtype)
                dD = (d_out.to(dtype) * u.to(dtype)).sum((0, 1)).to(D.dtype)
        gradient = [x.to(of.dtype) for x, of in ((du, u), (d_delta, delta), (dA, A), (dB, B), (dC, C))]
        return *gradient, dD, d_state if ctx.needs_input_grad[6] else None


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The steps of each chunk of tensors (batch, time, dim), in the dtype of states.

    The last is filled up with zeros: a step of no size leaves the state as it is.
    """
    first = tensors[0]
    length = chunk_length(first.shape[1])
    if first.device.type == "cpu":
        length = min(length, LONGEST_CHUNK_ON_CPU)
    dtype = state_dtype(first.dtype)
    filled = (F.pad(x.to(dtype), (0, 0, 0, -first.shape[1] % length)) for x in tensors)
    return list(zip(*(x.split(length, 1) for x in filled), strict=True))


def _states(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """The decays and the states of a chunk's steps: (batch, time, channels, state) each."""
    decay = (delta[..., None] * A).exp_()
    h = (delta * u)[..., None] * B[:, :, None, :]
    h[:, 0] += decay[:, 0] * start
    _scan_(decay.clone(), h)
    return decay, h


def _scan_(products: Tensor, h: Tensor, backwards: bool = False) -> None:
    """Turns what each of 2^n steps writes into the states after it; `products`, at first the decays, is used up.

    Backwards in time, a step's decay is that of the one after it.
    """
    batch, length, *sizes = h.shape
    into, out_of, last = (0, 1, slice(0, 1)) if backwards else (1, 0, slice(-1, None))
    half = 1
    while half < length:
        h_, p_ = (x.view(batch, length // (2 * half), 2, half, *sizes) for x in (h, products))
        h_[:, :, into].addcmul_(p_[:, :, into], h_[:, :, out_of, last])
        half *= 2
        if half < length:
            p_[:, :, into] *= p_[:, :, out_of, last]
