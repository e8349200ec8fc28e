"""Waits for a lock that another process holds, and says for whom."""

from __future__ import annotations

import fcntl
from typing import IO


def wait_for(lock: IO[str], holder: str) -> None:
    """Takes the lock; if another process has it, says that it waits for the `holder`. It is released with the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for {holder} to end ...", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
