"""Keeps a batch's copy on the CPU, which answers questions about the batch without waiting for a GPU.

A question to a tensor on a GPU (`item()`, `nonzero()`, `if mask.any()`) waits until all operators before it are done;
then the GPU idles until the next one is launched. Batches come from the CPU, where an answer costs no wait.
"""

from typing import Any

import torch
from torch import Tensor


def move(x: Tensor, device: Any) -> Tensor:
    """Copies `x` to `device` without waiting for it; the copy remembers `x`."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda" and x.numel():
        return remember(x.pin_memory().to(device=device, non_blocking=True), x)
    return x.to(device=device, non_blocking=True)


def remember(moved: Tensor, x: Tensor) -> Tensor:
    """Notes that `moved` is a copy of `x`, as long as neither is changed; returns it."""
    moved._on_host = x, x._version, moved._version  # type: ignore[attr-defined]
    return moved


def known(x: Tensor) -> Tensor | None:
    """The numbers of `x` on the CPU, if there is no need to wait for them; None otherwise."""
    for of in (x, x._base):
        # A view has no copy of its own; its base may have one.
        # A change in place of either raises its version, and the copy is no longer that of the tensor.
        host, *versions = getattr(of, "_on_host", (None,))
        if not isinstance(of, Tensor) or not isinstance(host, Tensor) or [host._version, of._version] != versions:
            continue
        if of is x:
            return host
        if of.is_contiguous() and x.is_contiguous() and of.numel() == x.numel():
            return host.reshape(x.shape)
    return x if x.device.type == "cpu" else None


def on_host(x: Tensor) -> Tensor:
    """The numbers of `x` on the CPU; waits for a GPU only if they were computed there."""
    found = known(x)
    return x.cpu() if found is None else found


def contains(x: Tensor, number: int) -> bool:
    """True if `number` is among the numbers of `x`."""
    found = known(x)
    return bool(x.eq(number).any()) if found is None else number in found.numpy()
