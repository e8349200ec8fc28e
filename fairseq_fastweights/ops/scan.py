"""The selective scan (Gu & Dao 2023, Algorithm 2): its definition, its chunk-parallel form, its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.ops import backends, checks
from fairseq_fastweights.ops.backends import choose_backend, say_backend
from fairseq_fastweights.ops.checks import state_dtype, without_autocast
from fairseq_fastweights.ops.chunkwise.chunks import chunk_length
from fairseq_fastweights.ops.kernels import (
    can_change,
    differentiable_once,
    differentiated,
    first_state,
    last_contiguous,
    mark_changed,
    selective_scan_forward,
    selective_scan_step_,
)
from fairseq_fastweights.ops.rules import no_steps

SCAN_INTERVAL = 32
"""The steps that lie between the states that the kernels keep for the backward pass."""
INPUTS = ("u", "delta", "A", "B", "C", "D")


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A diagonal state space whose steps depend on the input (Gu & Dao 2023, Eq. 2a and 2b, Algorithm 2).

        h_t = exp(delta_t A) * h_{t-1} + (delta_t * u_t) B_t^T,   y_t = h_t C_t + D * u_t

    with h_t of shape (channels, state), delta_t and u_t a number for each channel, B_t and C_t one for each dimension
    of the state. The input term is delta_t B_t u_t, as in the authors' code; the paper's Eq. 4 has a further factor,
    which is near 1 for small steps. A delta of 0 leaves the state as it is. Any strides will do.

    Args:
        u: (batch, time, channels), the input.
        delta: (batch, time, channels), the size of each step, at least 0.
        A: (channels, state), at most 0: how fast each state decays.
        B: (batch, time, state), the input's projection to the state.
        C: (batch, time, state), the state's projection to the output.
        D: (channels,), the factor of `u` in the output; None for 0.
        initial_state: (batch, channels, state), float32 (float64 for `u` in float64); None for zeros.
        in_place: whether the final state is written into `initial_state`, as in generation. Such a call cannot be
            differentiated.
        backend: one of `BACKENDS`; "native" has kernels for CPUs alone.

    All but `initial_state` are of the dtype of `u` or float32.

    Returns:
        out (batch, time, channels), in the dtype of `u`, and the final state, as `initial_state`.

    Raises:
        ValueError: for a shape, dtype or device that does not fit, or `in_place` without a state, with one that shares
            memory with an input, or where a gradient is wanted; the message names the argument.
        BackendUnavailable: if the backend cannot do it.
        NotImplementedError: of "native", if an input carries a tangent of forward-mode differentiation.

    Examples:
        >>> u, delta, A = torch.randn(2, 10, 6), torch.rand(2, 10, 6), -torch.rand(6, 4)
        >>> out, state = selective_scan(u, delta, A, torch.randn(2, 10, 4), torch.randn(2, 10, 4))
        >>> out.shape, state.shape
        (torch.Size([2, 10, 6]), torch.Size([2, 6, 4]))
    """
    _check(u, delta, A, B, C, D, initial_state)
    inputs = (u, delta, A, B, C, D)
    asked, reason = "auto" if backend == "fla" else backend, _why_not_native(u)
    backend = choose_backend(asked, u.shape[1], reason, in_chunks=True)
    say_backend(u.device.type, asked, reason, in_chunks=True)
    if backend == "native":
        backends.refuse_tangents(initial_state, *inputs)
    # The state that is written into; None if the final state is a new tensor.
    state = checks.check_in_place(initial_state, INPUTS, inputs) if in_place else None
    if u.shape[1] == 0:
        if state is not None:
            return torch.zeros_like(u), state
        return no_steps(u, (u.shape[0], *A.shape), initial_state, inputs)
    if state is not None and backend == "native" and u.shape[1] == 1 and can_change(state):
        return native_step_(*inputs, state=state), state
    if backend == "chunkwise":
        out, final_state = ScanFunction.apply(*inputs, initial_state)  # type: ignore[no-untyped-call]
    else:
        run: Any = native if backend == "native" else reference
        out, final_state = run(*inputs, initial_state=initial_state)
    return out, final_state if state is None else state.copy_(final_state)


def reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step at a time: the definition. Its gradients are those that autograd finds through the loop.

    Before the steps of `starts`, (batch, time), the state is emptied.
    """
    dtype = state_dtype(u.dtype)
    A = A.to(dtype)
    state = u.new_zeros(u.shape[0], *A.shape, dtype=dtype) if initial_state is None else initial_state
    outputs = []
    kept = [None] * u.shape[1] if starts is None else (~starts[..., None, None]).unbind(1)
    for u_t, delta_t, B_t, C_t, kept_t in zip(*(x.to(dtype).unbind(1) for x in (u, delta, B, C)), kept, strict=True):
        if kept_t is not None:
            state = torch.where(kept_t, state, 0)
        # h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t^T,  y_t = C_t h_t
        decay = (delta_t[..., None] * A).exp()
        state = decay * state + (delta_t * u_t)[..., None] * B_t[:, None, :]
        outputs.append((state * C_t[:, None, :]).sum(-1))
    out = torch.stack(outputs, 1)
    return (out if D is None else out + D.to(dtype) * u.to(dtype)).to(u.dtype), state


def native(*inputs: Any, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Every step by the compiled kernels: `out` and the final state."""
    u, delta, A, B, C, D = inputs
    keeps_states = differentiated(*inputs, initial_state)
    if u.shape[1] == 1 and not keeps_states:
        state = first_state(initial_state, u, (u.shape[0], *A.shape))
        return native_step_(*inputs, state=state), state
    u, delta, B, C = (last_contiguous(x) for x in (u, delta, B, C))
    # The backward pass computes the states between the kept ones again.
    interval = SCAN_INTERVAL if keeps_states else 0
    out, final_state, _ = selective_scan_forward(u, delta, A, B, C, D, initial_state, interval)
    return out, final_state


def native_step_(*inputs: Any, state: Tensor) -> Tensor:
    """One step, on a state that is changed in place, where `can_change` allows it: `out`."""
    u, delta, A, B, C, D = inputs
    u, delta, B, C = (last_contiguous(x) for x in (u, delta, B, C))
    out: Tensor = selective_scan_step_(u, delta, A, B, C, D, state)
    mark_changed(state)
    return out


def _why_not_native(u: Tensor) -> str | None:
    """Why no kernel takes such inputs; None if one does."""
    if u.device.type == "cuda":
        return "the selective scan has compiled kernels for CPUs alone"
    return backends.why_not(u.device.type, u.dtype)


def _check(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None
) -> None:
    given: dict[str, Tensor] = {"u": u, "delta": delta, "A": A, "B": B, "C": C}
    given |= {} if D is None else {"D": D}
    for name, tensor in given.items():
        checks.check_tensor(name, tensor)
    # Dimensions first: the sizes below are read from these two.
    for name, tensor, dims in (("u", u, "(batch, time, channels)"), ("A", A, "(channels, state)")):
        if tensor.dim() != dims.count(",") + 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {dims}")
    batch, time, channels = u.shape
    state = A.shape[1]
    if channels < 1 or state < 1:
        raise ValueError(f"A has shape {tuple(A.shape)}; channels and state must be at least 1")
    checks.check_shape("delta", delta, (batch, time, channels), "that of u")
    checks.check_shape("A", A, (channels, state), "(channels, state), with the channels of u")
    for name in ("B", "C"):
        checks.check_shape(name, given[name], (batch, time, state), "(batch, time, state) as u and A have them")
    if D is not None:
        checks.check_shape("D", D, (channels,), "(channels,) as u has them")
    for name, tensor in given.items():
        if tensor.dtype not in (u.dtype, torch.float32):
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be that of u, {u.dtype}, or torch.float32")
    if initial_state is not None:
        checks.check_state(initial_state, (batch, channels, state), "(batch, channels, state)", u.dtype)
        given["initial_state"] = initial_state
    checks.check_devices(given, "u", u)
    if checks.values_checked:
        checks.check_finite(given)
        if delta.numel() and (least := float(delta.detach().amin())) < 0:
            raise ValueError(f"delta has a least value of {least:g}; the sizes of steps must be at least 0")
        if (most := float(A.detach().amax())) > 0:
            raise ValueError(f"A has a largest value of {most:g}; it must be at most 0")


# Steps whose states are formed together: on a CPU they should stay in its cache.
LONGEST_CHUNK_ON_CPU = 16


class ScanFunction(torch.autograd.Function):
    """In chunks: (u, delta, A, B, C, D, initial_state) -> (out, final_state), for one step at least.

    h_t = a_t * h_{t-1} + w_t, with a_t = exp(delta_t A) and w_t = (delta_t u_t) B_t^T. The states of a chunk are formed
    all at once, chunk after chunk. Where the states of two neighbouring blocks are known as if each had begun at
    zero, those of the second lack only the contribution of the first block's last state,

        h_t += p_t * h_m     p_t = a_{m+1} ... a_t, m the last step of the first block

    and the products p are combined in the same way. No factor exceeds 1, nothing is divided or subtracted. Gradients of
    states, g_t = dy_t C_t^T + a_{t+1} * g_{t+1}, are the same recurrence backwards in time.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        u, delta, A, B, C, D, initial_state = inputs
        dtype = state_dtype(u.dtype)
        with without_autocast(u):
            rates = A.to(dtype)
            state = u.new_zeros(u.shape[0], *A.shape, dtype=dtype) if initial_state is None else initial_state
            states, outputs = [state], []
            # Only the states at the chunks' starts are kept for the backward pass.
            for u_c, delta_c, B_c, C_c in _chunks(u, delta, B, C):
                _, h = _states(u_c, delta_c, rates, B_c, states[-1])
                outputs.append((h @ C_c[..., None]).squeeze(-1))
                states.append(h[:, -1].clone())
            out = torch.cat(outputs, 1)[:, : u.shape[1]]
            if D is not None:
                out = out + D.to(dtype) * u.to(dtype)
        ctx.save_for_backward(*inputs, torch.stack(states[:-1]))
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
                # y_t = h_t C_t, and w_t = (delta_t u_t) B_t^T
                dC = (dy[:, :, None, :] @ h).squeeze(2)
                dB = ((delta_c * u_c)[:, :, None, :] @ g).squeeze(2)
                written = (g @ B_c[..., None]).squeeze(-1)
                decay[:, 0] *= start
                decay[:, 1:] *= h[:, :-1]
                # delta_t is in the decay exp(delta_t A) and in the input term.
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
    # The state before the chunk enters through its first step; the scan carries it on.
    h[:, 0] += decay[:, 0] * start
    _scan_(decay.clone(), h)
    return decay, h


def _scan_(products: Tensor, h: Tensor, backwards: bool = False) -> None:
    """Turns the inputs of 2^n steps into the states after them; `products`, at first the decays, is overwritten.

    Backwards in time, a step's decay is that of the one after it.
    """
    batch, length, *sizes = h.shape
    # Backwards in time the second block of a pair feeds the first.
    into, out_of, last = (0, 1, slice(0, 1)) if backwards else (1, 0, slice(-1, None))
    half = 1
    while half < length:
        h_, p_ = (x.view(batch, length // (2 * half), 2, half, *sizes) for x in (h, products))
        h_[:, :, into].addcmul_(p_[:, :, into], h_[:, :, out_of, last])
        half *= 2
        if half < length:
            p_[:, :, into] *= p_[:, :, out_of, last]
