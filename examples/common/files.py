"""Files that are whole or not there and no links to others, their locks; text that may be packed, and JSON lines."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")
SPLITS = ("train", "valid", "test")


class UserError(ValueError):
    """An error that ends a command; its message is for the person at the terminal."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, text in UTF-8, whole or not at all; a link in its place is replaced, not followed."""
    new = path.with_name(f"{path.name}.new")
    with open_new(new) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    new.replace(path)


def open_new(path: Path) -> BinaryIO:
    """Opens a file anew: in the place of a link, not where that leads to."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def open_to_append(path: Path) -> FileIO:
    """Opens a file to be read and appended to, which is made if it is not there. Raises OSError if it is a link."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, "a+b", buffering=0, opener=opener)
    except OSError:
        if path.is_symlink():
            raise OSError(f"{path} is a link; it must be a file") from None
        raise


def read_text(path: Path) -> list[str]:
    """The lines of a file, as `read_lines` has them."""
    return [text for text, _ in read_lines(path)]


def refuse_to_overwrite(*files: Path) -> None:
    for file in files:
        if file.exists():
            raise FileExistsError(f"{file} is there already; name another, or delete it")


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line of a file, plain or packed as .gz or .zst: its text without the line end, and its bytes.

    Only a line feed ends a line: the other line ends of Unicode and Python occur within sentences. A byte order mark is
    no part of the text. Raises UserError if the file cannot be read, or is not UTF-8.
    """
    number = 0
    try:
        with _open_packed(path) as file:
            for number, raw in enumerate(file, 1):
                text = raw.decode("utf-8")
                text = text.removeprefix("\ufeff") if number == 1 else text
                yield text.removesuffix("\n").removesuffix("\r"), raw
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} of the line is 0x{error.object[error.start]:02x}"
        raise UserError(f"{path}, line {number}: not UTF-8, {place}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged, or not what its name says: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def _open_packed(path: Path) -> Iterator[Iterable[bytes]]:
    if path.suffix != ".zst":
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
        return
    if shutil.which("zstd") is None:
        raise UserError(f"{path} cannot be read: there is no program zstd")
    with subprocess.Popen(["zstd", "-dcq", path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout
        if process.wait():
            raise UserError(f"{path} is damaged, or not what its name says")


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends a line of JSON, which is on the disk when this returns; half a line that a crash left is removed first.
    Raises OSError if it cannot be written, or the file is a link.
    """
    line = (json.dumps(value) + "\n").encode()
    with open_to_append(path) as file:
        with suppress(OSError):  # a file system without such locks
            fcntl.lockf(file, fcntl.LOCK_EX)  # a line that another process is writing is no half line
        file.seek(0)
        text = file.read()
        if text[-1:] not in (b"", b"\n"):  # without locks, this must not cut off lines that others wrote since
            file.truncate(text.rfind(b"\n") + 1)
        if file.write(line) != len(line):
            raise OSError(f"{path} could not be written whole: is the disk full?")
        os.fsync(file.fileno())


def read_values(path: Path, read: Callable[[Any], T], kind: str) -> list[tuple[int, T]]:
    """Reads a file of JSON lines, with the number of the line of each value; a line may hold a list of values.

    `read`: makes a value of JSON; it may raise ValueError, TypeError, KeyError or AttributeError. `kind`: the name of a
    value in the error. Half a line at the end is left out; a file that is missing has no values. Raises UserError for a
    line that cannot be read.
    """
    found: list[tuple[int, T]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), 1):
        try:
            values = json.loads(line)
            found += [(number, read(value)) for value in (values if isinstance(values, list) else [values])]
        except (ValueError, TypeError, KeyError, AttributeError):  # noqa: PERF203 (each line has its own error)
            raise UserError(f"{path}, line {number} is no {kind}; remove the line") from None
    return found


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
