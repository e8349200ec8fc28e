"""Finds exactly where tensors share memory: by addresses, sizes and strides.

A step in place writes where it has not read everything yet. Most tensors lie apart, which two comparisons of addresses
show; a closer look is only taken at those that do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Numbers = tuple[int, ...]


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
        begin = written.data_ptr()
        if begin == 0:
            return None
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
