"""Turns autocast off for the operations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off on the device of `x`: operations run in the dtypes of their inputs.

    On a device that has no autocast, as meta, it does nothing; `torch.autocast` refuses such a one even to be off.
    """
    if torch.amp.is_autocast_available(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
