"""Fast weight rules over a text whose segments lie in several processes, each a segment.

Every process runs its own segment from an empty state. The effect of a segment on the state that enters it is linear,

    S_out = A S_in + F,

with F the state that it ends with, and A a decay for each number of the state (`diagonal_rule`) or, where the rule
removes the value that a key retrieves, a matrix of (key_dim, key_dim) for each head (`delta_rule`). The processes
exchange A and F, once; from those before it each computes the state that enters its segment, and adds its queries'
outputs from it. docs/sequence-parallelism.md has the costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.ops.kernels import differentiable_once


class _AllGather(torch.autograd.Function):
    """(...) of each process as (processes, ...) in all of them; a process's gradient is the sum of all processes'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _entering(state: Tensor, passed: Callable[[int, Tensor], Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """The state that enters this process's segment: all segments before it are applied to the first state.

    All segments are gone through in all processes, and some for nothing: who exchanged something must have a gradient
    of it, of zeros if need be, since in the backward pass all wait for it.
    """
    for rank in range(dist.get_world_size(group)):
        is_before = torch.tensor(rank < dist.get_rank(group), device=state.device)
        state = torch.where(is_before, passed(rank, state), state)
    return state


def diagonal_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_key_decay: Tensor | None = None,
    log_value_decay: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> Tensor:
    """`ops.fast_weight_rule` without a correction, over the segments of all processes in the order of their ranks.

    `q`, `k`: (batch, time, heads, key_dim), of this process's segment, as all that follow. `v`: (batch, time, heads,
    value_dim). `log_key_decay`: (batch, time, heads) or (batch, time, heads, key_dim), at most 0; None for no decay.
    `log_value_decay`: (batch, time, heads, value_dim), at most 0, or None. `group`: the processes; all unless it
    is given. `backend`: of the operation. Returns (batch, time, heads, value_dim), of this process's segment.
    """
    out, final = ops.fast_weight_rule(
        q, k, v, log_key_decay=log_key_decay, log_value_decay=log_value_decay, backend=backend
    )
    # Logs of the remaining share, at each step, of a state that entered: (batch, time, heads, key_dim or 1) and (batch,
    # time, heads, value_dim or 1). They are sums of numbers that are at most 0, so that exp cannot overflow.
    whole = torch.zeros_like(v[..., :1], dtype=final.dtype)
    keys = whole if log_key_decay is None else log_key_decay.reshape(*v.shape[:3], -1).to(final.dtype).cumsum(dim=1)
    values = whole if log_value_decay is None else log_value_decay.to(final.dtype).cumsum(dim=1)
    # One message: the final state, and the decays of the whole segment.
    parts = [final.flatten(2), keys[:, -1], values[:, -1]]
    finals, key_decays, value_decays = _AllGather.apply(torch.cat(parts, dim=-1), group).split(
        [part.shape[-1] for part in parts], dim=-1
    )
    decays = (key_decays[..., :, None] + value_decays[..., None, :]).exp()
    states = finals.view(len(finals), *final.shape)
    state = _entering(torch.zeros_like(final), lambda rank, x: decays[rank] * x + states[rank], group)
    read = torch.einsum("bthk,bhkv->bthv", q * keys.exp(), state) * values.exp()
    return out + read.to(out.dtype)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_gate: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> Tensor:
    """`ops.delta_rule`, or `ops.gated_delta_rule` with a gate, over the segments of all processes.

    One call computes a segment's outputs and the matrix A: its values have key_dim columns more, which write zeros into
    a state that starts as the identity.

    `q`, `k`: (batch, time, heads, key_dim), of this process's segment, as all that follow. `v`: (batch, time, heads,
    value_dim). `beta`: (batch, time, heads). `log_gate`: (batch, time, heads) or (batch, time, heads, key_dim), at most
    0; None for no decay. `group` and `backend` as of `diagonal_rule`, as is the result.
    """
    batch, _, heads, key_dim = k.shape
    width = v.shape[-1]
    dtype = ops.state_dtype(v.dtype)
    identity = torch.eye(key_dim, dtype=dtype, device=v.device).expand(batch, heads, -1, -1)
    # Columns of values start empty, those of A as the identity: the rule turns these into A.
    start = torch.cat([identity.new_zeros(batch, heads, key_dim, width), identity], dim=-1)
    both, final = ops.fast_weight_rule(
        q,
        k,
        torch.cat([v, v.new_zeros(*v.shape[:3], key_dim)], dim=-1),
        erase=k,
        beta=beta,
        log_key_decay=log_gate,
        initial_state=start,
        backend=backend,
    )
    sent = _AllGather.apply(final, group)
    state = _entering(start[..., :width], lambda rank, x: sent[rank, ..., width:] @ x + sent[rank, ..., :width], group)
    # A query's output from the state that entered, as a vector of its keys.
    read = torch.einsum("bthk,bhkv->bthv", both[..., width:].to(dtype), state)
    return both[..., :width] + read.to(both.dtype)
