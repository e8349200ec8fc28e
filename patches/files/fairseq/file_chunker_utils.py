"""Reads the parts of a text file that several processes share, line by line.

It replaces fairseq's module of this name, which went back to find the beginning of a character, and before a byte that
is not UTF-8 to before the file.
"""

import codecs
import io
import os
from collections.abc import Iterator
from types import TracebackType

from fairseq.text_files import decode


def find_offsets(filename: str, num_chunks: int) -> list[int]:
    """The places where parts of about equal size, of whole lines, begin, and where the last one ends."""
    with open(filename, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        offsets = [0]
        for number in range(1, num_chunks):
            file.seek(size // num_chunks * number)
            # From anywhere in a line to the beginning of the next: a part has whole lines.
            file.readline()
            offsets.append(file.tell())
    return [*offsets, size]


class Chunker:
    """A context that gives the lines of a file from `start_offset` to `end_offset`; to its end if that is not positive.

    Raises:
        FileError: when bytes that are not UTF-8 are read.
    """

    def __init__(self, path: str, start_offset: int, end_offset: int) -> None:
        self.path = path
        self.start_offset = start_offset
        self.end_offset = end_offset

    def __enter__(self) -> Iterator[str]:
        self._file = open(self.path, "rb")
        return self._lines()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def _lines(self) -> Iterator[str]:
        place = self.start_offset
        self._file.seek(place)
        while self.end_offset <= 0 or place < self.end_offset:
            line = self._file.readline()
            if not line:
                return
            text = decode(line.removeprefix(codecs.BOM_UTF8) if place == 0 else line, self.path)
            place += len(line)
            # There are other line breaks than those that parts end with.
            yield from io.StringIO(text, newline=None) if "\r" in text else (text,)
