"""Lets a training go on when its log cannot: prints neither fail nor wait for a reader.

A signal often comes when nobody reads any more: Ctrl-C also ends the `tee` of `fairseq-train ... | tee log`, and a
terminal that is closed sends SIGHUP. A reader may also have stopped, so that its pipe is full.
"""

from __future__ import annotations

import _thread
import os
import select
import sys
from contextlib import suppress

_STDOUT, _STDERR = 1, 2
_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
_PATIENCE = 1.0
"""Seconds that a full pipe's reader has for making room, before text is dropped."""


class LogOutlets:
    """The outlets of this process, for stdout and stderr."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int] | None] = {}
        self._open: dict[int, _Outlet] = {}

    def begin(self) -> None:
        """Notes the files behind stdout and stderr: if these close, files that are opened later get their numbers."""
        if not self._open:
            streams = {_STDOUT: sys.__stdout__, _STDERR: sys.__stderr__}
            self._files = {fd: _file(fd) for fd, stream in streams.items() if stream is not None}

    def open(self) -> None:
        """Puts pipes with threads in the place of stdout and stderr, so that no print depends on their readers."""
        # Only numbers that still belong to the noted files, or to none: others are files of somebody else by now.
        ours = [fd for fd, file in self._files.items() if fd not in self._open and _file(fd) in (file, None)]
        with suppress(OSError):  # no more files can be opened
            for fd in ours:  # all, before a file that is opened gets their numbers
                if _file(fd) is None:
                    _redirect_to_null(fd)
            for fd in ours:
                self._open[fd] = _Outlet(fd)

    def open_if_unread(self) -> None:
        """As `open`, if nobody will read stdout or stderr any more."""
        if any(fd not in self._open and _gone(fd) for fd in self._files):
            self.open()

    def say(self, text: str) -> None:
        """Writes a line to stderr, if that is open, without Python's stream, which may be about to write."""
        if _STDERR in self._open:
            os.write(_STDERR, f"{text}\n".encode())

    def close(self) -> None:
        """Gives stdout and stderr back, once the text is read or its time is over."""
        for outlet in self._open.values():
            outlet.close()
        self._open = {}


class _Outlet:
    """A pipe in the place of an output, and a thread that passes on its text as long as the output takes it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._target = fd, os.dup(fd)
        self._source, sink = os.pipe()
        os.dup2(sink, fd)
        os.close(sink)
        self._works = _thread.allocate_lock()
        self._works.acquire()
        _thread.start_new_thread(self._pass_on, ())  # threading takes locks, which a signal may find taken

    def _pass_on(self) -> None:
        room, patience = select.poll(), _PATIENCE
        room.register(self._target, select.POLLOUT)
        # A write of up to PIPE_BUF bytes does not wait once poll says that there is room.
        while printed := os.read(self._source, select.PIPE_BUF):
            with suppress(OSError):
                if room.poll(patience * 1000):
                    os.write(self._target, printed)
                    patience = _PATIENCE
                else:
                    patience = 0
        os.close(self._source)
        os.close(self._target)
        self._works.release()

    def close(self) -> None:
        if _gone(self._target):
            _redirect_to_null(self._fd)
        else:
            os.dup2(self._target, self._fd)
        # That ends the pipe, unless a process that was forked meanwhile holds it.
        self._works.acquire(timeout=2 * _PATIENCE)


def _redirect_to_null(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)


def _file(fd: int) -> tuple[int, int] | None:
    """Identifies the open file; None if it is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & _GONE for _, event in poll.poll(0))
