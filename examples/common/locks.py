"""Locks in a folder that several machines share: who holds one is named, and what a dead process held is taken over.

The lock NAME is held by who made the file NAME.N of the highest N, unless that is empty. Files are made by a hard link,
which NFS does for one process alone, and with all that is in them. To take a lock over is to make the next one, so that
no file of another process is ever removed while it counts. An owner touches its file every `BEAT` seconds. On the
owner's own machine the system says whether it lives: it, or a process that inherited its descriptor, has locked the
file. On others it is dead once it has been silent for `DEAD` seconds, by the clock of the file system.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

BEAT, DEAD = 30.0, 600.0
_KEPT = 8
"""Files of earlier owners that stay, so that who is about to make one of these learns that it is too late."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    `host`, `process`: where and which it is. `since`: when it took it. `machine`: what tells the system that runs it
    from others. `silent`: for how many seconds it has not touched its file; 0 on its own machine.
    """

    host: str
    process: int
    since: str
    machine: str
    silent: float = 0.0

    @property
    def beats(self) -> bool:
        """True if it has been heard of lately; its file's times may be known a minute late."""
        return self.silent < 4 * BEAT

    def __str__(self) -> str:
        silent = "" if self.beats else f", silent for {self.silent:.0f} s"
        return f"process {self.process} on {self.host}, since {self.since}{silent}"


@dataclass
class Lock:
    """A lock that this process holds. `file`: that of it. `descriptor`: for the processes that hold it, too."""

    file: Path
    descriptor: int
    touched: float

    def beat(self) -> bool:
        """Says that the owner lives, if that is due; returns whether it still holds the lock."""
        if time.monotonic() - self.touched < BEAT:
            return True
        self.touched = time.monotonic()
        try:
            os.utime(self.file)
        except FileNotFoundError:
            return False
        except OSError:  # of a server that is away for a moment
            return True
        return _newest(_named(self.file))[1] == self.file

    def release(self) -> None:
        os.truncate(self.descriptor, 0)
        os.close(self.descriptor)


def take(name: Path) -> Lock | Holder:
    """Takes a lock, or says who has it. The folder must be there, on a file system that has hard links."""
    own = name.with_name(f".{name.name}.{uuid.uuid4().hex}")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = Holder(socket.gethostname(), os.getpid(), now, _machine())
    try:
        own.write_text(json.dumps(asdict(holder)), encoding="utf-8")
        number, file = _newest(name)
        other = _living(file, own.stat().st_mtime) if file else None
        if other is not None:
            return other
        descriptor = os.open(own, os.O_RDWR | os.O_CLOEXEC)
        with suppress(OSError):  # where a file system has no such locks, there are processes to look for
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made = name.with_name(f"{name.name}.{number + 1}")
        with suppress(FileExistsError):
            os.link(own, made)
        if own.stat().st_nlink == 2:  # NFS may lose the answer, and say that the file was there
            # Who looked very long ago has made a file again that was removed since.
            if _newest(name)[1] == made:
                _remove_before(name, number + 1 - _KEPT)
                return Lock(made, descriptor, time.monotonic())
            made.unlink(missing_ok=True)
        os.close(descriptor)
    finally:
        own.unlink(missing_ok=True)
    return take(name)


def _named(file: Path) -> Path:
    return file.with_suffix("")


def _numbers(name: Path) -> list[int]:
    found = (path.name.removeprefix(f"{name.name}.") for path in name.parent.iterdir())
    return [int(number) for number in found if number.isascii() and number.isdecimal()]


def _newest(name: Path) -> tuple[int, Path | None]:
    number = max(_numbers(name), default=0)
    return number, name.with_name(f"{name.name}.{number}") if number else None


def _remove_before(name: Path, last: int) -> None:
    for number in _numbers(name):
        if number < last:
            name.with_name(f"{name.name}.{number}").unlink(missing_ok=True)


def _living(file: Path, now: float) -> Holder | None:
    """Who holds the lock by this file, the newest one; None if nobody does."""
    try:
        text, touched = file.read_text(encoding="utf-8"), file.stat().st_mtime
        holder = Holder(**json.loads(text))
    except FileNotFoundError:  # there is a newer one by now
        return None
    except (ValueError, TypeError):
        return None
    silent = max(0.0, now - touched)
    if holder.machine == _machine() != "":
        lives = _is_locked(file)
        if lives is None:
            lives = Path(f"/proc/{holder.process}").exists()
        return holder if lives else None
    return Holder(holder.host, holder.process, holder.since, holder.machine, silent) if silent < DEAD else None


def _is_locked(file: Path) -> bool | None:
    """True if a process of this machine has locked it; None if the file system cannot tell."""
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _machine() -> str:
    """The running system, and its processes' names; "" if it does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
