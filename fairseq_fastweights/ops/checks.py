"""Argument checks that every operation makes before it does any work.

Checks of shapes, types and devices are always made: they read no data. Checks of *values* (finite numbers, log gates at
most 0, beta in its range) would make the CPU wait for a GPU, so they are made only where `check_values` asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Numbers = tuple[int, ...]

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ALLOWED = frozenset(FLOAT_TYPES)

values_checked = os.environ.get("FASTWEIGHTS_CHECK_VALUES", "0") not in ("", "0")
"""Whether operations check values, as `check_values` asked for."""


class BackendUnavailable(RuntimeError):
    """The backend that was asked for cannot do this here. No other silently takes its place."""


class check_values:
    """Turns the checks of values on or off: ``check_values(True)``, or ``with check_values(True): ...``.

    They are off unless the environment variable ``FASTWEIGHTS_CHECK_VALUES`` is set to something other than 0 when
    the package is imported. While they are on, each operation raises a `ValueError` for inputs that are not finite,
    log gates and log decays above 0, and beta outside [0, 1] (of rules with a gate or an erase key beside it, [0, 2]),
    and `selective_scan` for a delta below 0 and an A above 0; on a GPU each call then waits for the device.

    Args:
        enabled: whether values are checked from here on; in a `with` statement, until its end.

    Examples:
        >>> from fairseq_fastweights import ops
        >>> q, k, v = torch.rand(3, 1, 5, 2, 4).unbind(0)
        >>> with check_values(True):
        ...     out, state = ops.delta_rule(q, k, v, torch.full((1, 5, 2), 1.5))
        Traceback (most recent call last):
        ValueError: beta ranges from 1.5 to 1.5; it must be in [0, 1]
    """

    def __init__(self, enabled: bool) -> None:
        global values_checked
        self._before = values_checked
        values_checked = bool(enabled)

    def __enter__(self) -> check_values:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global values_checked
        values_checked = self._before


@dataclass(frozen=True)
class Gate:
    """An input of a rule beside q, k and v. A layer makes it of its own input by a projection and a sigmoid.

    Attributes:
        name: of the argument.
        per: the numbers at every step: one for each "head", or for each "key" or "value" dimension of each head;
            "head or key" takes both.
        log: whether it is the logarithm of a decay, at most 0; otherwise it is a beta, from 0 to `most`. Either is 0 at
            padding. The biases of a layer's decays start so that these are uniformly distributed (Gu et al. 2020).
        optional: whether None will do, for no such gate.
        kind: "gate", or "key": any values, in as many heads as k.
        most: the largest beta.
    """

    name: str
    per: Literal["head", "key", "value", "head or key"]
    log: bool = False
    optional: bool = False
    kind: Literal["gate", "key"] = "gate"
    most: float = 1

    @property
    def projection(self) -> str:
        """The name of a layer's projection for it."""
        return f"{self.name.removeprefix('log_')}_proj"


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    gates: Sequence[Gate] = (),
    given: Sequence[Tensor | None] = (),
    starts: Tensor | None = None,
) -> None:
    """Raises `ValueError` for inputs that a rule cannot take.

    Args:
        q: (batch, time, key_heads, key_dim), of one dtype with v.
        k: as q.
        v: (batch, time, heads, value_dim), heads a multiple of key_heads.
        initial_state: (batch, heads, key_dim, value_dim) or None.
        gates: the other inputs of the rule.
        given: of each gate (batch, time, heads), with key_dim or value_dim after it where it is per key or per value.
        starts: (batch, time) of bool, or None.
    """
    dtype = getattr(v, "dtype", None)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            dims = f"(batch, time, heads, {'value_dim' if name == 'v' else 'key_dim'})"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have four dimensions: {dims}")
        if x.dtype != dtype and isinstance(v, Tensor):
            check_tensor("v", v)
            raise ValueError(f"{name} has dtype {x.dtype}; it must be that of v, {dtype}")
        if not x.is_contiguous() and x.shape[-1] > 1 and x.stride(-1) not in (0, 1):
            raise ValueError(f"{name} has strides {x.stride()}; its last dimension must be contiguous (stride 1)")
    # Sizes come from v and k; q and the gates have to fit them.
    batch, time, heads, value_dim = v.shape
    of_keys, of_steps = k.shape, (batch, time, heads)
    key_heads, key_dim = of_keys[2:]
    check_shape("q", q, of_keys, "that of k")
    if key_dim < 1 or value_dim < 1 or heads < 1 or key_heads < 1:
        raise ValueError(
            f"k has shape {tuple(of_keys)} and v {tuple(v.shape)}: heads, key_dim and value_dim must be at least 1"
        )
    if of_keys[0] != batch or of_keys[1] != time:
        check_shape("v", v, (*of_keys[:2], heads, value_dim), "batch and time as k has them")
    if heads % key_heads:
        raise ValueError(
            f"v has shape {tuple(v.shape)} and k {tuple(of_keys)}; the heads of v, {heads}, must be those of k, "
            f"{key_heads}, or a multiple"
        )
    others: dict[str, Tensor] = {"q": q, "k": k}
    # Float32 is allowed beside half precision: log decays near 0 need its digits.
    for gate, given_gate in zip(gates, given, strict=True):
        if given_gate is None and gate.optional:
            continue
        x = check_tensor(gate.name, given_gate)
        if gate.kind == "key":
            shape, meaning = tuple(of_keys), "that of k"
        elif gate.per == "head" or (gate.per == "head or key" and x.dim() == 3):
            shape, meaning = of_steps, "(batch, time, heads)"
        elif gate.per == "value":
            shape, meaning = (*of_steps, value_dim), "(batch, time, heads, value_dim)"
        else:
            shape, meaning = (*of_steps, key_dim), "(batch, time, heads, key_dim)"
        check_shape(gate.name, x, shape, meaning)
        if x.dtype != dtype and (gate.kind == "key" or x.dtype != torch.float32):
            other = "" if gate.kind == "key" else ", or torch.float32"
            raise ValueError(f"{gate.name} has dtype {x.dtype}; it must be that of v, {dtype}{other}")
        others[gate.name] = x
    if initial_state is not None:
        check_state(initial_state, (batch, heads, key_dim, value_dim), "(batch, heads, key_dim, value_dim)", v.dtype)
        others["initial_state"] = initial_state
    if starts is not None:
        if not isinstance(starts, Tensor) or starts.dtype != torch.bool:
            kind = starts.dtype if isinstance(starts, Tensor) else type(starts).__name__
            raise ValueError(f"starts is of {kind}; it must be a tensor of torch.bool")
        check_shape("starts", starts, (batch, time), "(batch, time)")
        others["starts"] = starts
    check_devices(others, "v", v)
    # These read all numbers.
    if values_checked:
        others.pop("starts", None)
        _check_values({**others, "v": v}, zip(gates, given, strict=True))


def check_in_place(
    initial_state: Tensor | None, names: Sequence[str], inputs: Sequence[Tensor | None], starts: Tensor | None = None
) -> Tensor:
    """Returns the state that is to be changed in place, or raises `ValueError` if it cannot be.

    Args:
        initial_state: it must share no memory with `inputs` and `starts`.
        names: of `inputs`.
        inputs: all other inputs, which must not require a gradient.
        starts: as `check_inputs` takes it.
    """
    if initial_state is None:
        raise ValueError("initial_state is None and in_place is True; there must be a state to write into")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (initial_state, *inputs)):
        raise ValueError(
            "in_place is True, but initial_state or an input requires a gradient; a change in place cannot be "
            "differentiated: call it under torch.no_grad()"
        )
    if overlaps_itself(initial_state):
        raise ValueError(
            f"initial_state has strides {initial_state.stride()} and in_place is True; its elements must not share "
            "memory"
        )
    if torch.compiler.is_compiling():
        return initial_state  # compiled code reads everything before it writes
    if initial_state.is_neg():
        raise ValueError(
            "initial_state is a negative view, as the imaginary part of a conjugate, and in_place is True; it must be "
            "a tensor of its own, as resolve_neg() makes it"
        )
    # A step writes the state where it has not read every input yet.
    shared = first_overlap(initial_state, (*inputs, starts))
    if shared is not None:
        raise ValueError(
            f"{(*names, 'starts')[shared]} shares memory with initial_state and in_place is True, which writes there; "
            "it must have memory of its own, as clone() makes it"
        )
    return initial_state


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, and of all arithmetic, for inputs of `dtype`.

    Args:
        dtype: of q, k and v.

    Returns:
        float64 for float64, else float32.

    Examples:
        >>> state_dtype(torch.bfloat16)
        torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(name: str, tensor: object) -> Tensor:
    """Returns it if it is a tensor of a dtype that operations take."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is of type {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.dtype not in _ALLOWED:
        allowed = ", ".join(str(t).removeprefix("torch.") for t in FLOAT_TYPES)
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be one of {allowed}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; it must be torch.strided, as of to_dense()")
    return tensor


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """`meaning` explains the shape in the error."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}, {meaning}")


def check_state(state: object, shape: tuple[int, ...], meaning: str, dtype: torch.dtype) -> None:
    """An initial state for inputs of `dtype`; `meaning` names the dimensions."""
    checked = check_tensor("initial_state", state)
    check_shape("initial_state", checked, shape, meaning)
    wanted = state_dtype(dtype)
    if checked.dtype != wanted:
        raise ValueError(f"initial_state has dtype {checked.dtype}; it must be {wanted} for inputs of {dtype}")


def check_devices(tensors: dict[str, Tensor], of: str, like: Tensor) -> None:
    """`of` is the name of `like`, on whose device all are to be."""
    device = like.device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on device {tensor.device}; it must be on that of {of}, {device}")


def check_finite(tensors: dict[str, Tensor]) -> None:
    """The tensor of each name; reads all of them."""
    for name, tensor in tensors.items():
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            raise ValueError(f"{name} holds {int((~finite).sum())} values that are not finite; all must be")


def _check_values(tensors: dict[str, Tensor], gates: Iterable[tuple[Gate, Tensor | None]]) -> None:
    check_finite(tensors)
    for gate, values in gates:
        if values is None or not values.numel() or gate.kind == "key":
            continue
        least, most = (float(x) for x in torch.aminmax(values.detach()))
        if gate.log and most > 0:
            raise ValueError(f"{gate.name} has a largest value of {most:g}; logs of decays must be at most 0")
        if not gate.log and not 0 <= least <= most <= gate.most:
            raise ValueError(f"{gate.name} ranges from {least:g} to {most:g}; it must be in [0, {gate.most:g}]")


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off on the device of `x`: operations run in the dtypes of their inputs.

    Where autocast is not on, or a device has none, as meta, it does nothing: entering takes microseconds.
    """
    device = x.device.type
    # To enter autocast's own context takes microseconds.
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def overlaps_itself(x: Tensor) -> bool:
    """True if two elements share memory; of a tensor that a compiler traces, if they may, by sizes and strides."""
    if x.is_contiguous() or 0 in x.shape:
        return False
    if torch.compiler.is_compiling():
        return not _elements_are_disjoint(x.shape, x.stride())
    return _overlaps_itself(x.shape, x.stride())


def first_overlap(written: Tensor, read: Iterable[Tensor | None]) -> int | None:
    """Finds the tensor of `read` that shares memory with `written`, which no two elements do; all are on one device.

    Returns:
        The first one's number, or None; also None for tensors that have no memory, as those of the device "meta" and
        those that a compiler traces.
    """
    if isinstance(written, FakeTensor):
        return None
    near = []
    try:
        # Intervals of addresses first: most tensors lie apart.
        begin = written.data_ptr()
        if begin == 0:
            return None
        # [begin, end) are the addresses from the first element to the last.
        end = begin + _extent(written)
        for number, x in enumerate(read):
            if x is None or (start := x.data_ptr()) >= end:
                continue
            if start + (x.nbytes if x.is_contiguous() else _extent(x)) > begin:
                near.append((number, x, start - begin))
    except RuntimeError:  # torch's, for a tensor that stands for others
        return None
    return next((number for number, x, distance in near if _meet(*_layout(written), *_layout(x), distance)), None)


def _extent(x: Tensor) -> int:
    """How many bytes lie from the first element to the end of the last."""
    if x.is_contiguous():
        return x.nbytes
    return x.element_size() * _reach(x.shape, x.stride())


@lru_cache(maxsize=256)
def _reach(sizes: Numbers, strides: Numbers) -> int:
    """The same of elements of size 1."""
    return 0 if 0 in sizes else 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def _layout(x: Tensor) -> tuple[Numbers, Numbers, int]:
    return x.shape, x.stride(), x.element_size()


def _elements_are_disjoint(sizes: Numbers, strides: Numbers) -> bool:
    """True if each stride is beyond the reach of all smaller ones: then no two elements share memory."""
    # Strides of dimensions of size 1 mean nothing.
    dims = [(n, stride) for n, stride in zip(sizes, strides, strict=True) if n > 1]
    for number, (_, stride) in enumerate(dims):
        others = dims[:number] + dims[number + 1 :]
        if stride <= sum((n - 1) * other for n, other in others if other <= stride):
            return False
    return True


@lru_cache(maxsize=256)
def _overlaps_itself(sizes: Numbers, strides: Numbers) -> bool:
    """Marks the places of the elements, where strides alone do not tell."""
    if _elements_are_disjoint(sizes, strides):
        return False
    if any(n > 1 and stride == 0 for n, stride in zip(sizes, strides, strict=True)):
        return True
    # As many marks as elements: then no two elements share a place.
    marks = torch.zeros(_reach(sizes, strides), dtype=torch.bool, device="cpu")
    return _at(marks, sizes, strides).fill_(True).numel() > int(marks.sum())


@lru_cache(maxsize=256)
def _meet(
    sizes: Numbers,
    strides: Numbers,
    width: int,
    other_sizes: Numbers,
    other_strides: Numbers,
    other_width: int,
    distance: int,
) -> bool:
    """True if elements of two tensors share memory; `width` is that of an element, and `distance` of the first ones.

    The places of one are marked, and those of the other looked at.
    """
    # In the largest unit that both tensors' elements are multiples of.
    unit = gcd(width, other_width, distance)
    width, other_width, distance = width // unit, other_width // unit, distance // unit
    first, other_first = max(0, -distance), max(0, distance)
    ends = (
        start + _reach(n, steps) * wide
        for start, n, steps, wide in (
            (first, sizes, strides, width),
            (other_first, other_sizes, other_strides, other_width),
        )
    )
    marks = torch.zeros(max(ends), dtype=torch.bool, device="cpu")
    _at(marks, sizes, strides, width, first).fill_(True)
    return bool(_at(marks, other_sizes, other_strides, other_width, other_first).any())


def _at(marks: Tensor, sizes: Numbers, strides: Numbers, width: int = 1, first: int = 0) -> Tensor:
    """The marks of a tensor's elements, `width` for each."""
    return marks.as_strided((*sizes, width), (*(stride * width for stride in strides), 1), first)
