"""Checks binarised data, and that a dictionary is a file, before they are read.

Every load of an indexed data set and of a dictionary calls this module. fairseq trusts an index: one that is cut short
is an error of NumPy, or gives numbers that memory held by chance; one of a longer file, and a token that is not in the
dictionary, are errors in the middle of an epoch.
"""

import math
import os
import stat
import struct
from collections.abc import Sized
from functools import lru_cache
from typing import Any, NamedTuple, TextIO

import numpy as np
from fairseq.data_files import note, state_of
from fairseq.text_files import FileError, open_text

_MMAP, _CACHED, _HUFFMAN = b"MMIDIDX\x00", b"TNTIDX\x00\x00", b"HUFFIDX\x00"
_HEADS = {_MMAP: "<BQBQ", _CACHED: "<QQQQQ"}
"""The formats of the bytes after the magic number, which has a ninth byte in the first of them."""
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
"""fairseq's codes of types."""
_DIMENSIONS = 32
"""NumPy's arrays have no more."""


class _Index(NamedTuple):
    """The claims of an index about the file with the tokens.

    Attributes:
        dtype: of a token.
        first: number that stands for the dictionary's first type.
        size: of the file, in bytes.
    """

    dtype: np.dtype[Any]
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

    Raises `FileError` if there is none, and for a folder or another pipe, which might be waited for forever.
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
    if size != index.size:
        raise FileError(
            f"{path} has {size:,} bytes; by {os.path.basename(prefix)}.idx it must have {index.size:,}: it is cut "
            "short, or the index is of other data"
        )
    if types is None:
        return
    if index.dtype.kind not in "iu":
        raise FileError(f"{path} holds numbers of type {index.dtype}; tokens must be whole numbers")
    # The largest and the smallest are enough: all ids between them are in the dictionary.
    for token in _extremes(path, index.dtype):
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
    """None for a Huffman code, which is not checked. Raises `FileError` if the index is damaged."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        magic = file.read(8)
        if magic == _HUFFMAN:
            return None
        if magic not in _HEADS:
            raise FileError(f"{path} is damaged: it begins with {magic!r}, as no index does")
        head = file.read(struct.calcsize(_HEADS[magic]))
        if len(head) < struct.calcsize(_HEADS[magic]):
            raise FileError(f"{path} is cut short: it has {size} bytes, fewer than an index begins with")
        values = struct.unpack(_HEADS[magic], head)
        if magic == _MMAP:
            ninth, version, code, entries = values
            expected = 26 + entries * (4 + 8)
        else:
            version, code, unit, entries, numbers = values
            ninth, expected = 0, 48 + 8 * (2 * (entries + 1) + numbers)
        if ninth or version != 1 or code not in _TYPES:
            raise FileError(
                f"{path} is damaged: version {version + (ninth << 64)} and type {code}, where version is 1 and type "
                "1 to 10"
            )
        # The header, an int32 and an int64 for each entry; or int64s alone.
        if size != expected:
            raise FileError(
                f"{path} has {size:,} bytes; with the {entries:,} entries that it says it must have {expected:,}: it "
                "is cut short or damaged"
            )
        dtype = np.dtype(_TYPES[code])
        if magic == _CACHED:
            dims, places = (np.fromfile(file, np.int64, entries + 1) for _ in range(2))
            sizes = _sizes(dims, np.fromfile(file, np.int64, numbers))
            wrong = (sizes < 0) | (np.diff(places) != sizes) | (unit != dtype.itemsize)
        else:  # each begins where those before it end
            sizes = np.fromfile(file, np.int32, entries).astype(np.int64)
            places = np.fromfile(file, np.int64, entries)
            places = np.append(places, places[-1:] + sizes[-1:] * dtype.itemsize)
            wrong = (sizes < 0) | (np.diff(places) != sizes * dtype.itemsize)
        last = int(places[-1]) if len(places) else 0
        if wrong.any() or (places < 0).any() or places[:1].any():
            raise FileError(
                f"{path} is damaged: entry {int(wrong.argmax())}, or the one after it, is where no entry can be"
            )
        # The cached format is Lua's, which counts from 1.
        return _Index(dtype, 0, last) if magic == _MMAP else _Index(dtype, 1, last * dtype.itemsize)


def _sizes(dims: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many numbers each entry has, of which `dims` says where its dimensions are; -1 where they cannot be."""
    counts = np.diff(dims)
    in_order = dims[0] == 0 and dims[-1] == len(numbers) and ((counts >= 0) & (counts <= _DIMENSIONS)).all()
    if not in_order or (numbers < 0).any():
        return np.full(len(counts), -1)
    if (counts == 1).all():  # as text has
        return numbers
    return np.array([math.prod(part.tolist()) for part in np.split(numbers, dims[1:-1])], object)
