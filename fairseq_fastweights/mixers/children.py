"""How a mixer uses its child modules: it calls them, unless a fused operation may read their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_fastweights.ops.elementwise import gate


def are_plain(modules: Sequence[Any], kind: type[nn.Module] = nn.Linear) -> bool:
    """True if modules do what their class `kind` does with the parameters that they show.

    Only of such modules may a fused operation read the parameters; others have to be called. Hooks may bring weights
    for the length of a call, as accelerate's do where weights are offloaded, or change what comes out; modules of other
    classes, as of adapters, quantization and parametrizations, may compute something else.
    """
    for module in modules:
        own = vars(module)
        if (
            type(module) is not kind
            or "forward" in own
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return False
    return True


def in_rows(x: Tensor) -> Tensor:
    """`x`, (time, batch, width), as one matrix of rows that follow one another; a copy only if it is none.

    torch multiplies any other layout, as that of a transposed tensor, with frozen weights as one small matrix for each
    step.
    """
    of_time, of_batch, _ = x.stride()
    return x if of_time == x.shape[1] * of_batch else x.flatten(0, 1).contiguous().view(x.shape)


def gated_norm(
    norm: Any,
    y: Tensor,
    logits: Tensor,
    activation: str,
    *,
    eps: float,
    dtype: torch.dtype,
    backend: str,
    size: int = 1,
) -> Tensor:
    """activation(logits) * norm(y / sqrt(size)), with the heads of y, (..., heads, dim), side by side.

    Args:
        norm: an RMS norm of each head, which adds `eps` under its root.
        y: (..., heads, dim).
        logits: (..., heads * dim).
        activation, eps, dtype, backend: as of `ops.elementwise.gate`.
        size: what squares of y are divided by.
    """
    if are_plain([norm], nn.RMSNorm):
        # The norm of y / sqrt(size) is that of y with `size` times the epsilon: the division costs nothing.
        eps = eps * size
        return gate(logits, activation, y=y, weight=norm.weight, norm="rms", eps=eps, dtype=dtype, backend=backend)
    y = norm(y if size == 1 else y * size**-0.5).flatten(-2)
    return gate(logits, activation, y=y, dtype=dtype, backend=backend)
