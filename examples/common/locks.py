"""Locks of files, which the system frees when the processes that hold them have ended."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path


def take(file: Path) -> int | None:
    """Locks a file, which is made if it is not there; returns its descriptor, or None if another process has the lock.

    It is held until the descriptor is closed: by this process and by those that inherited it. Raises OSError where the
    file system has no locks, or the file is a link.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise OSError(f"{file} cannot be locked: {error.strerror}; choose a folder on another file system") from None
    return descriptor


def sign(descriptor: int) -> None:
    """Writes into a locked file who has it, in the place of who had it before."""
    os.ftruncate(descriptor, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode(), 0)
