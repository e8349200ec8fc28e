"""Files that are whole or not there, that are no links to others, and text that may be packed."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO


class TextError(ValueError):
    """Text that cannot be used; the message is for the person who gave it."""


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


def refuse_to_overwrite(*files: Path) -> None:
    for file in files:
        if file.exists():
            raise FileExistsError(f"{file} is there already; name another, or delete it")


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line of a file, plain or gzipped: its text without the line end, and its bytes.

    Only a line feed ends a line: what else Unicode and Python take for an end of line occurs within sentences. Raises
    TextError if the file cannot be read, or is not UTF-8.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for text, raw in decode_lines(path, file):
                yield text.removesuffix("\n").removesuffix("\r"), raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TextError(f"{path} is no whole gzip file: {error}") from None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None


def decode_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Each line of what is in a file: its text, to which a byte order mark does not belong, and its bytes.

    Raises TextError if it is not UTF-8.
    """
    for number, raw in enumerate(lines, 1):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            told = f"{path}, line {number}: not UTF-8, byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
            raise TextError(told) from None
        yield text.removeprefix("\ufeff") if number == 1 else text, raw
