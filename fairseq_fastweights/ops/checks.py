"""Argument checks that every operation makes before it does any work.

Checks of shapes, types and devices are always made: they read no data. Checks of *values* (finite numbers, log gates
at most 0, write strengths in [0, 1]) would make a GPU wait for the CPU, so they are made only where `check_values`
asks for them.
"""

from __future__ import annotations

import os
from types import TracebackType

import torch
from torch import Tensor

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_values_checked = os.environ.get("FASTWEIGHTS_CHECK_VALUES", "0") not in ("", "0")


class check_values:
    """Turns the checks of values on or off: ``check_values(True)``, or ``with check_values(True): ...``.

    They are off unless the environment variable ``FASTWEIGHTS_CHECK_VALUES`` is set to something other than 0 when
    the package is imported. While they are on, each operation raises a `ValueError` for inputs that are not finite,
    log gates and log decays above 0, and write strengths outside [0, 1]; on a GPU each call then waits for the
    device.
    """

    def __init__(self, enabled: bool) -> None:
        global _values_checked
        self._before = _values_checked
        _values_checked = bool(enabled)

    def __enter__(self) -> check_values:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _values_checked
        _values_checked = self._before


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    *,
    strengths: dict[str, Tensor] | None = None,
    log_decays: dict[str, tuple[Tensor | None, int | None]] | None = None,
) -> None:
    """Raises `ValueError` for inputs that an operation cannot take.

    Args:
        q, k: (batch, time, heads, key_dim), of one dtype with v.
        v: (batch, time, heads, value_dim).
        initial_state: (batch, heads, key_dim, value_dim) or None.
        strengths: write strengths by argument name, each (batch, time, heads).
        log_decays: by argument name, the tensor (or None) and the size of its last dimension after
            (batch, time, heads), None for a tensor that ends with the heads.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have four dimensions: "
                f"(batch, time, heads, {'value_dim' if name == 'v' else 'key_dim'})"
            )
    batch, time, heads, key_dim = k.shape
    value_dim = v.shape[3]
    _check_shape("q", q, (batch, time, heads, key_dim), "that of k")
    _check_shape("v", v, (batch, time, heads, value_dim), "(batch, time, heads) as k has them")
    if key_dim < 1 or value_dim < 1 or heads < 1:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: heads, key_dim and value_dim must be at least 1"
        )
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dtype != v.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be that of v, {v.dtype}")
    state_type = state_dtype(v.dtype)

    others: list[tuple[str, Tensor]] = [("q", q), ("k", k), ("v", v)]
    per_step = [(name, tensor, None) for name, tensor in (strengths or {}).items()]
    per_step += [(n, t, size) for n, (t, size) in (log_decays or {}).items() if t is not None]  # type: ignore[misc]
    for name, tensor, size in per_step:
        _check_tensor(name, tensor)
        shape: tuple[int, ...] = (batch, time, heads) + (() if size is None else (size,))
        _check_shape(name, tensor, shape, "(batch, time, heads" + (", dim)" if size else ")"))
        if tensor.dtype not in (v.dtype, state_type):
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be that of v, {v.dtype}, or {state_type}")
        others.append((name, tensor))
    if initial_state is not None:
        _check_tensor("initial_state", initial_state)
        shape = (batch, heads, key_dim, value_dim)
        _check_shape("initial_state", initial_state, shape, "(batch, heads, key_dim, value_dim)")
        if initial_state.dtype != state_type:
            raise ValueError(
                f"initial_state has dtype {initial_state.dtype}; it must be {state_type} for inputs of {v.dtype}"
            )
        others.append(("initial_state", initial_state))
    for name, tensor in others:
        if tensor.device != v.device:
            raise ValueError(f"{name} is on device {tensor.device}; it must be on that of v, {v.device}")
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) not in (0, 1):
            if name in ("q", "k", "v"):
                raise ValueError(
                    f"{name} has strides {tensor.stride()}; its last dimension must be contiguous (stride 1)"
                )
    if _values_checked:
        _check_values(others, strengths or {}, log_decays or {})


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, and of all arithmetic, for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is of type {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.dtype not in FLOAT_TYPES:
        allowed = ", ".join(str(t).removeprefix("torch.") for t in FLOAT_TYPES)
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be one of {allowed}")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}, {meaning}")


def _check_values(
    tensors: list[tuple[str, Tensor]],
    strengths: dict[str, Tensor],
    log_decays: dict[str, tuple[Tensor | None, int | None]],
) -> None:
    for name, tensor in tensors:
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            raise ValueError(f"{name} holds {int((~finite).sum())} values that are not finite; all must be")
    for name, (log_decay, _) in log_decays.items():
        if log_decay is not None and log_decay.numel() and float(log_decay.max()) > 0:
            raise ValueError(
                f"{name} has a largest value of {float(log_decay.max()):g}; logs of decays must be at most 0"
            )
    for name, strength in strengths.items():
        if strength.numel() and not (0 <= float(strength.min()) and float(strength.max()) <= 1):
            raise ValueError(
                f"{name} ranges from {float(strength.min()):g} to {float(strength.max()):g}; "
                "write strengths must be in [0, 1]"
            )
