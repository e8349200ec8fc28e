"""SIGINT and SIGTERM in training: the current update ends, a checkpoint is written, and then the process ends."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Notes the first of these signals, `number`; 0 before it. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.number = 0
        self._former: dict[int, Any] = {}
        self._pid = 0

    def begin(self) -> None:
        """Starts to note signals, except those that were ignored, as SIGINT in a shell's background job."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._pid != os.getpid():  # forked, perhaps, from a process that had noted one of its own
            self._pid, self.number = os.getpid(), 0
        for number in _NUMBERS:
            if signal.getsignal(number) not in (signal.SIG_IGN, self._note):
                self._former[number] = signal.signal(number, self._note)

    def end(self) -> None:
        """Restores what signals did before `begin`."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former, self.number = {}, 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A data worker, forked from it. Ctrl-C reaches all processes of a terminal: it must not end before the
            # update that is waiting for its batch, and ends with the process that it works for.
            if number == signal.SIGTERM:
                os._exit(128 + number)
        elif number == self.number == signal.SIGINT:
            os._exit(128 + number)
        else:
            self.number = number
            # No logger: what it does may just have been interrupted.
            again = "; once more: ends at once" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            os.write(2, f"{name}: ends after this update, when its checkpoint is written{again}\n".encode())


def leave(number: int) -> NoReturn:
    """Ends this process with the exit code that shells give to a process that the signal ended.

    It skips Python's own shutdown, which would abort the process (SIGABRT) if a thread that reads batches is running
    PyTorch's code.
    """
    logging.shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + number)
