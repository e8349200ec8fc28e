"""Processes that share a program's work and end with it, and signals that must not end it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pool
from multiprocessing.pool import Pool as Processes
from typing import Any


@contextmanager
def pool(workers: int, start: Callable[..., None] | None = None, *arguments: Any) -> Iterator[Processes]:
    """So many processes; each calls `start(*arguments)` first. They leave signals to this one, which ends them.

    They are ended by SIGTERM, and Python forgets a signal that comes between a fork and the new process's first
    steps, if this one has a handler for it: the process would live on, and be waited for without end. So the signal
    is held back until the process has none. (The pool's threads hold it back for good, and so processes that these
    start later have it held back, too.)
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        processes = Pool(workers, _start, (start, arguments))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with processes:
        yield processes


def _start(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if start is not None:
        start(*arguments)


ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keeps signals that would end this program waiting until the block is done.

    Only the main thread can, and only there does Python act on signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    now = {number: signal.getsignal(number) for number in ENDINGS}
    handlers = {number: handler for number, handler in now.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])
