"""Keeps memory that large tensors gave back for the next ones, instead of returning it to the system."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # in malloc.h
_KEPT = 2**30
"""Bytes that are kept, at most, beyond what lies between blocks that are in use."""


def keep_freed_memory() -> None:
    """Tells glibc, where it is there, to keep what is freed in this process, up to a gigabyte.

    By default it gives large blocks back. The system hands their pages out again one by one, filled with zeros, which
    can take a call that returns tens of megabytes as much time as its arithmetic.
    """
    if hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_MMAP_MAX, 0)
