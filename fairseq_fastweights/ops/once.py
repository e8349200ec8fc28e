"""Refuses second derivatives of functions that have a backward pass of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
    """Makes the `backward` of a `torch.autograd.Function` of one that also takes the tensors that `ctx` has saved.

    If it is differentiated in turn, that is an error. torch's `once_differentiable` does not see that gradients depend
    on what was saved, and `torch.autograd.grad`, asked for those of certain tensors, goes around its error: the second
    derivatives that it gives lack a part. So all that gradients depend on has to be saved.
    """

    @wraps(backward)
    def once(ctx: Any, *d_outs: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx, saved, *d_outs)
        if not torch.is_grad_enabled():
            return gradients
        found = [x for x in gradients if x is not None]
        refuse: Callable[..., Any] = _Refusing.apply
        refusing = iter(refuse(len(found), *found, *d_outs, *saved))
        return tuple(None if x is None else next(refusing) for x in gradients)

    return once


class _Refusing(torch.autograd.Function):
    """The first `count` tensors, as depending on the others too."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> Any:
        return tuple(x.view_as(x) for x in tensors[:count] if x is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("this operation cannot be differentiated twice; backend='reference' can")
