"""The rules step by step, where a document holds what is not finite: it must not reach the others of its row.

Chunks multiply what comes from another document by 0, and 0 times NaN is NaN; steps empty the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_fastweights.ops import reference
from fairseq_fastweights.ops.checks import state_dtype
from fairseq_fastweights.ops.chunkwise.layout import LONGEST_CHUNK, answers


def are_apart(starts: Tensor | None, tensors: Sequence[Tensor | None], logs: Sequence[Tensor | None] = ()) -> bool:
    """True if chunks keep documents apart: `tensors` are finite, and no number of `logs` is NaN, or there is one.

    Also true where the answer would have to be waited for (docs/limits.md).
    """
    if starts is None or not answers(starts):
        return True
    finite = all(bool(x.sum(dtype=state_dtype(x.dtype)).isfinite()) for x in tensors if x is not None)
    return finite and not any(bool(x.sum().isnan()) for x in logs if x is not None)


def step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor | None,
    beta: Tensor | None,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes step by step, a chunk again backwards."""
    outputs, state = [], initial_state
    for t in range(0, v.shape[1], LONGEST_CHUNK):
        first, *chunk = (
            None if x is None else x[:, t : t + LONGEST_CHUNK]
            for x in (starts, q, k, v, erase, beta, log_key_decay, log_value_decay)
        )
        out, state = checkpoint(
            reference.fast_weight_rule, *chunk, initial_state=state, starts=first, use_reentrant=False
        )
        outputs.append(out)
    assert state is not None
    return torch.cat(outputs, 1), state


def gradients_of(
    run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None], d_outs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of the inputs of a function, as autograd finds them."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        given = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(run(*leaves), given, d_outs, allow_unused=True))
    return [None if x is None else next(found) for x in leaves]
