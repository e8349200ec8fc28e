"""Looks at binarised data, and whether a dictionary is a file, before anything of it is read.

Every load of an indexed data set and of a dictionary calls this module.

fairseq believes what an index says: one that is cut short is an error of NumPy, or numbers that memory held by chance;
one that says more than there is in the file with the tokens, and a token that the dictionary has not, are errors in the
middle of an epoch.
"""

import os
import stat
import struct
from collections.abc import Sized
from functools import lru_cache
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt
from fairseq.data_files import note, state_of
from fairseq.text_files import FileError, open_text

_MMAP, _CACHED = b"MMIDIDX\x00", b"TNTIDX\x00\x00"
_TYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.double,
    8: np.uint16,
    9: np.uint32,
    10: np.uint64,
}
"""Numbers of the types of tokens, as fairseq has them."""


class _Index(NamedTuple):
    """The claims of an index about the file with the tokens.

    Attributes:
        dtype: of a token.
        first: number that stands for the dictionary's first type.
        size: in bytes, at least that of the file.
    """

    dtype: npt.DTypeLike
    first: int
    size: int


def check_split(prefix: str, dictionary: Sized | None) -> None:
    """Checks `prefix`.idx, `prefix`.bin and that the dictionary has all tokens, which fairseq reads at once anyway.

    Splits of other formats, as text, are only noted (`data_files.noted`). Raises `FileError`.
    """
    index, tokens = f"{prefix}.idx", f"{prefix}.bin"
    if not (os.path.exists(index) and os.path.exists(tokens)):
        note(path for path in (prefix, f"{prefix}.fasta") if os.path.isfile(path))
        return
    for path in (index, tokens):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileError(f"{path} is no regular file; data must be what fairseq-preprocess wrote")
    _check(prefix, None if dictionary is None else len(dictionary), state_of(index), state_of(tokens))
    note((index, tokens))


def check_folder(path: str) -> None:
    """Raises `FileError` if a folder of data is not there."""
    if not os.path.isdir(path):
        raise FileError(f"argument data: there is no folder {path}")


def open_dictionary(path: str) -> TextIO:
    """Opens a dictionary; a pipe alone that the shell made of a command's output, as in `--srcdict <(...)`.

    Raises `FileError` if there is none, and for what is no file: to open a pipe might wait forever.
    """
    if not os.path.exists(path):
        raise FileError(f"there is no dictionary {path}; fairseq-preprocess writes it beside the data")
    if not stat.S_ISREG(os.stat(path).st_mode) and not path.startswith("/dev/fd/"):
        raise FileError(f"{path} is no regular file; it must be a dictionary, as fairseq-preprocess writes it")
    opened: TextIO = open_text(path, newline="\n")  # a word may have other line breaks in it
    return opened


@lru_cache(maxsize=64)  # a split may be loaded for its message, and again for each epoch
def _check(prefix: str, types: int | None, *_: object) -> None:
    path = f"{prefix}.bin"
    index = _read_index(f"{prefix}.idx")
    if index is None:
        return
    size = os.path.getsize(path)
    if size < index.size:
        raise FileError(
            f"{path} has {size:,} bytes; by {os.path.basename(prefix)}.idx it must have {index.size:,}: it is cut "
            "short, or the index is of other data"
        )
    if types is None:
        return
    for token in _extremes(path, np.dtype(index.dtype)):
        if not 0 <= token - index.first < types:
            raise FileError(
                f"{path} has the token number {token - index.first}; the dictionary has {types:,} types, and numbers "
                f"go from 0 to {types - 1}: the file is damaged, or dict.txt is of other data"
            )


def _extremes(path: str, dtype: np.dtype[Any]) -> tuple[int, ...]:
    """The largest and the smallest token of a file, if it has any; not by a memory map, as `data_files` says."""
    found: list[int] = []
    with open(path, "rb") as file:
        while len(tokens := np.fromfile(file, dtype, 2**22)):
            found += [int(tokens.max()), int(tokens.min())]
    return (max(found), min(found)) if found else ()


def _read_index(path: str) -> _Index | None:
    """Raises `FileError` if the index is damaged; None for one of another format."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        magic = file.read(8)
        if magic not in (_MMAP, _CACHED):
            if size < 8 or not any(magic):
                raise FileError(f"{path} is damaged: it begins with {magic!r}, as no index does")
            return None
        head = file.read(18 if magic == _MMAP else 40)
        if len(head) < (18 if magic == _MMAP else 40):
            raise FileError(f"{path} is cut short: it has {size} bytes, fewer than an index begins with")
        if magic == _MMAP:
            more, version, code, entries = struct.unpack("<BQBQ", head)
            version += more << 64  # the first byte is still one of the magic number, which has nine
            expected = 26 + entries * (4 + 8)
        else:
            version, code, _, entries, numbers = struct.unpack("<QQQQQ", head)
            expected = 48 + 8 * (2 * (entries + 1) + numbers)
        if version != 1 or code not in _TYPES:
            raise FileError(
                f"{path} is damaged: version {version} and type {code}, where version is 1 and type 1 to 10"
            )
        if size != expected:
            raise FileError(
                f"{path} has {size:,} bytes; with the {entries:,} entries that it says it must have {expected:,}: it "
                "is cut short or damaged"
            )
        dtype = np.dtype(_TYPES[code])
        if magic == _MMAP:
            sizes = np.fromfile(file, np.int32, entries).astype(np.int64)
            begins = np.fromfile(file, np.int64, entries)
            wrong, ends = (sizes < 0) | (begins < 0), begins + sizes * dtype.itemsize
            first = 0
        else:
            dims, begins = np.fromfile(file, np.int64, entries + 1), np.fromfile(file, np.int64, entries + 1)
            sizes = np.diff(begins)
            wrong = (np.diff(dims) < 0) | (sizes < 0) | (begins[:-1] < 0)
            if numbers == entries:  # each has one dimension, as text has
                wrong |= sizes != np.fromfile(file, np.int64, numbers)
            ends, first = begins * dtype.itemsize, 1  # the format is Lua's, which counts from 1
        if wrong.any():
            raise FileError(f"{path} is damaged: entry {int(wrong.argmax())} is where no entry can be")
        return _Index(dtype, first, int(ends.max(initial=0)))
