"""SIGINT, SIGTERM and SIGHUP in training: the current update ends, a checkpoint is written, then the process ends."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

from fairseq_fastweights import command_line
from fairseq_fastweights.tasks.log_outlets import LogOutlets

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Notes the first of these signals in `number`, which is 0 before. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.number = 0
        self.log = LogOutlets()
        self._former: dict[int, Any] = {}
        self._pid = 0

    def begin(self) -> None:
        """Starts to note signals, except those that were ignored: in a shell's background SIGINT, by nohup SIGHUP."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._pid != os.getpid():  # forked, perhaps, from a process that had noted one of its own
            self._pid, self.number, self.log = os.getpid(), 0, LogOutlets()
        self.log.begin()
        for number in _NUMBERS:
            if signal.getsignal(number) not in (signal.SIG_IGN, self._note):
                self._former[number] = signal.signal(number, self._note)

    def end(self) -> None:
        """Restores the handlers from before `begin`."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former, self.number = {}, 0
        self.log.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A data worker, forked from it. Ctrl-C and a closed terminal reach all processes of that terminal: it must
            # not end before the update that is waiting for its batch, and ends with the process that it works for.
            if number == signal.SIGTERM:
                os._exit(128 + number)
        elif number == self.number == signal.SIGINT:
            os._exit(128 + number)
        else:
            self.number = number
            self.log.open()
            again = "; once more: ends at once" if number == signal.SIGINT else ""
            name = signal.Signals(number).name
            self.log.say(f"{name}: ends after this update, when its checkpoint is written{again}")

    def leave(self, number: int) -> NoReturn:
        """Ends this process with the exit code that shells give to a process that the signal ended."""
        command_line.leave(128 + number, self.log.close)
