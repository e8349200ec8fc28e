"""Logs that nobody reads, for `faults.py`: each takes the place of stdout and stderr, and returns what spoils it."""

import fcntl
import os
import pty
import select
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress


def _put(file: int) -> None:
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115


def _read_until_told(source: int) -> Callable[[], object]:
    """Reads by a thread, which closes the file at its end."""
    told = threading.Event()

    def read() -> None:
        while not told.is_set():
            if select.select([source], [], [], 0.01)[0]:
                os.read(source, 2**16)
        os.close(source)

    threading.Thread(target=read, daemon=True).start()
    return told.set


def read_by_a_process() -> Callable[[], object]:
    """A pipe, whose reader ends a moment later."""
    source, sink = os.pipe()
    _put(sink)
    return _read_until_told(source)


def full() -> Callable[[], object]:
    """A pipe, which is full from then on."""
    _, sink = os.pipe()
    _put(sink)

    def fill() -> None:
        # The other end of the same pipe, which may wait or not by itself.
        other = os.open("/dev/fd/1", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(other, b"x")

    return fill


def terminal() -> Callable[[], object]:
    """The terminal of a session of its own, which is closed: the system sends SIGHUP."""
    os.setsid()
    controller, file = pty.openpty()
    fcntl.ioctl(file, termios.TIOCSCTTY, 0)
    _put(file)
    return _read_until_told(controller)


LOGS = {"reader": read_by_a_process, "full": full, "terminal": terminal}
