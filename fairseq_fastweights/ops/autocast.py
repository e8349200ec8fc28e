"""Turns autocast off for the operations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off on the device of `x`: operations run in the dtypes of their inputs.

    Where autocast is not on, or a device has none, as meta, it does nothing: entering takes microseconds.
    """
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
