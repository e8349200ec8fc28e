"""Memory that calls free, kept by the process for the calls after them."""

from __future__ import annotations

import ctypes
import sys

# Of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tells glibc to give nothing back to the system; returns whether it was there to be told.

    By default it gives large blocks back, and the system hands pages out again one by one, filled with zeros. To a call
    that returns tens of megabytes this can add as much time as it takes itself; which calls it strikes depends on what
    the contestants before them left.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(M_TRIM_THRESHOLD, LARGEST)) and bool(library.mallopt(M_MMAP_MAX, 0))
