"""Reads text files as UTF-8, without the byte order mark at their beginning; names bytes that are not UTF-8.

The module imports Python's standard library alone, so that `tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import codecs
import io
import os
from typing import Any, TextIO

from ..invalid_input import InvalidInput  # relative, to be found in fairseq, too


class FileError(InvalidInput):
    """An error in a file; its message is one line that names the file."""


def open_text(path: str | os.PathLike[str], newline: str | None = None) -> TextIO:
    """Opens a text for reading, as `open` does.

    Args:
        path: of a file, or of a pipe.
        newline: as for `open`.

    Raises:
        FileError: once bytes are read that are not UTF-8; names file, line and byte.
    """
    return _as_text(open(path, "rb", buffering=0), os.fspath(path), newline)


def read_text(path: str | os.PathLike[str]) -> str:
    """Reads a text; raises as `open_text`."""
    with open_text(path) as file:
        return file.read()


def text_of(stream: TextIO) -> TextIO:
    """The text of a standard stream, decoded as by `open_text`, in any locale.

    Args:
        stream: `sys.stdin`, from which nothing has been read; a stream without a buffer of bytes is returned as it is.
    """
    content: Any = getattr(stream, "buffer", None)
    if content is None:
        return stream
    return _as_text(getattr(content, "raw", content), "standard input", None, owner=stream)


def decode(content: bytes, path: str | os.PathLike[str]) -> str:
    """Decodes whole lines of a file; raises as `open_text`."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        # The file is read once more to find the number of the line.
        with open_text(path) as file:
            while file.read(2**16):
                pass
        raise FileError(f"{path} has changed while it was read") from None


class _Checked(io.RawIOBase):
    """Passes on the bytes of a file as long as they are UTF-8, and counts lines for the error."""

    def __init__(self, file: Any, name: str, owner: object) -> None:
        self._file, self.name, self._owner = file, name, owner
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._read, self._lines, self._line_begins = 0, 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        content = bytes(memoryview(buffer)[:count])
        try:
            self._decoder.decode(content, final=not count)
        except UnicodeDecodeError as error:
            # The decoder's object also begins with the bytes of a character that the last read cut in two.
            place = self._read + count - len(error.object) + error.start
            before = content[: max(0, place - self._read)]
            self._count(before)
            raise _no_utf8(self.name, self._lines + 1, place - self._line_begins + 1, place, error) from None
        self._count(content)
        self._read += count
        return int(count)

    def close(self) -> None:
        if not self.closed and self._owner is None:
            self._file.close()
        super().close()

    def _count(self, content: bytes) -> None:
        self._lines += content.count(b"\n")
        if b"\n" in content:
            self._line_begins = self._read + content.rindex(b"\n") + 1


def _as_text(file: Any, name: str, newline: str | None, owner: object = None) -> TextIO:
    buffered = io.BufferedReader(_Checked(file, name, owner), 2**16)
    return io.TextIOWrapper(buffered, encoding="utf-8-sig", newline=newline)


def _no_utf8(name: str, line: int, column: int, place: int, error: UnicodeDecodeError) -> FileError:
    found = error.object[error.start : error.start + 1].hex()
    return FileError(
        f"{name}, line {line}: not UTF-8, byte {column} of the line is 0x{found} (byte {place + 1} of the file)"
    )
