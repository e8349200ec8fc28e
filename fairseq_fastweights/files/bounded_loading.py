"""Reads files of `torch.save` without running code from them, in memory of a small multiple of their size.

torch's own loader is not used: it believes a file about sizes, and may find other records in it than a check that ran
before it. Here the same open file is parsed once (`zip_records`, `checkpoint_pickles`): the records that are checked
are those that the tensors are made of. The module imports torch and NumPy alone, so that `tools/build_fairseq.py` can
put it into fairseq, too.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import sys
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch

# Relative, to be found in fairseq, too.
from .checkpoint_pickles import Loader, Unpickler
from .digests import name_within, parts_of
from .zip_records import CheckpointError, Record, is_archive, records_in

_MULTIPLE, _MORE = 3, 2**24
"""The memory that values may take: so many times the file's size, plus these bytes for files of any size."""
_EXPANDED = 2**26
"""Bytes that tensors larger than their storage may claim in files of any size."""
_DEPTH = 100
"""The deepest nesting of plain values: functions that handle them are recursive."""
_VALUE, _SHARED, _REPEATED = 100, 2**20, 8
"""Bytes that one plain value counts for; bytes by repeated references that are always allowed; the largest ratio of the
bytes with repetitions to those without."""
_ALIGNED = 64
"""Bytes: a storage is mapped if it begins at a multiple of this, otherwise read: torch wants aligned numbers."""
_NUMBERS = (int, float, complex, bool, type(None), torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
"""The first two pickles of a file in the format from before torch 1.6."""


def load(file: BinaryIO, mapped: bool = False) -> Any:
    """The contents of an open file of `torch.save`, on the CPU.

    Args:
        file: the file.
        mapped: True maps the storages of an archive into memory, so that numbers are read once they are needed.

    Raises:
        CheckpointError: if it is damaged, asks for more than it could hold, or for anything that no checkpoint needs.
    """
    size = _size(file)
    state = _load_archive(file, size, mapped) if is_archive(file) else _load_legacy(file, size)
    _check(size, state)
    return state


def outline(file: BinaryIO) -> Any:
    """As `load`, with None in the place of each tensor; no storage is read.

    Raises:
        CheckpointError: as `load` does.
    """

    def load_nothing(key: str, numel: int, itemsize: int) -> None:
        return None

    size = _size(file)
    if is_archive(file):
        state = _unpickle(file, records_in(file), size, load_nothing)
    else:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _, state = _unpickle_legacy(content, size, load_nothing)
    _check(size, state)
    return state


def _load_archive(file: BinaryIO, size: int, mapped: bool) -> Any:
    records, storages = records_in(file), dict[str, torch.UntypedStorage]()
    # A copy-on-write mapping of the file that is open: whoever writes to a weight leaves the file alone.
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if mapped else None
    whole = torch.frombuffer(content, dtype=torch.uint8).untyped_storage() if content else None

    def load_storage(key: str, numel: int, itemsize: int) -> torch.UntypedStorage:
        record, nbytes = records.get(f"data/{key}"), numel * itemsize
        if record is None or record.size != nbytes:
            there = f"which has {record.size:,}" if record else "which is missing"
            raise CheckpointError(f"is damaged: a tensor needs {nbytes:,} bytes of its record data/{key[:50]}, {there}")
        if key not in storages:  # tensors may share one
            if whole is not None and record.begin % _ALIGNED == 0:
                storages[key] = whole[record.begin : record.begin + nbytes]
            else:
                storages[key] = _empty(nbytes)
                _fill(storages[key], file, record.begin)
        return storages[key]

    return _unpickle(file, records, size, load_storage)


def _unpickle(file: BinaryIO, records: dict[str, Record], size: int, load_storage: Loader) -> Any:
    """The value of an archive."""
    order = _read(file, records["byteorder"]) if "byteorder" in records else b"little"
    if order != sys.byteorder.encode():
        raise CheckpointError(f"is refused: its byte order is {order[:20]!r}; that of this machine is {sys.byteorder}")
    if "data.pkl" not in records:
        raise CheckpointError("is damaged or no checkpoint: it has no record data.pkl")
    return Unpickler(io.BytesIO(_read(file, records["data.pkl"])), _MULTIPLE * size + _MORE, load_storage).load()


def _read(file: BinaryIO, record: Record) -> bytes:
    file.seek(record.begin)
    return file.read(record.size)


def _load_legacy(file: BinaryIO, size: int) -> Any:
    # Storages follow the pickles: they are allocated here, as long as they fit into the file, and filled afterwards.
    storages, itemsizes, held = dict[str, torch.UntypedStorage](), dict[str, int](), 0

    def load_storage(key: str, numel: int, itemsize: int) -> torch.UntypedStorage:
        nonlocal held
        if key not in storages:
            held += numel * itemsize
            if held > size:
                raise CheckpointError(f"is refused: its tensors have at least {held:,} bytes; the file has {size:,}")
            storages[key], itemsizes[key] = _empty(numel * itemsize), itemsize
        if len(storages[key]) != numel * itemsize:
            raise CheckpointError(f"is damaged: its storage {key[:50]} has two sizes")
        return storages[key]

    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        unpickler, state = _unpickle_legacy(content, size, load_storage)
        keys, at = unpickler.load(), content.tell()
    if type(keys) is not list or any(type(key) is not str for key in keys) or sorted(keys) != sorted(storages):
        raise CheckpointError("is damaged: its storages are not those that its tensors need")
    # After the pickles: for each storage in this order, its number of elements (int64) and its bytes.
    for key in keys:
        file.seek(at)
        (numel,) = struct.unpack("<q", file.read(8).ljust(8, b"\xff"))
        if numel * itemsizes[key] != len(storages[key]):
            raise CheckpointError(f"is cut short or damaged: its storage {key[:50]} has {numel:,} numbers")
        _fill(storages[key], file, at + 8)
        at += 8 + len(storages[key])
    return state


def _unpickle_legacy(content: mmap.mmap, size: int, load_storage: Loader) -> tuple[Unpickler, Any]:
    """The unpickler and the value of a file in the format from before torch 1.6.

    Such a file is five pickles (magic number, version, machine, value, keys of the storages), then the storages. The
    unpickler is at the fourth pickle's end.
    """
    unpickler = Unpickler(cast(IO[bytes], content), _MULTIPLE * size + _MORE, load_storage)
    magic, version, machine = (unpickler.load() for _ in range(3))
    if (magic, version) != (_MAGIC, _VERSION) or type(machine) is not dict:
        raise CheckpointError("is damaged or no checkpoint: it does not begin as torch.save begins")
    if machine.get("little_endian") is not (sys.byteorder == "little"):
        raise CheckpointError(f"is refused: its byte order is another than that of this machine, {sys.byteorder}")
    return unpickler, unpickler.load()


def _size(file: BinaryIO) -> int:
    file.seek(0)
    if not file.read(1):
        raise CheckpointError("is empty (0 bytes)")
    return os.fstat(file.fileno()).st_size


def _empty(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _fill(storage: torch.UntypedStorage, file: BinaryIO, begin: int) -> None:
    """Reads a storage from the file."""
    file.seek(begin)
    view = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
    if len(view) and file.readinto(view) != len(view):  # type: ignore[attr-defined]  # which every open file has
        raise CheckpointError(f"is cut short or damaged: {len(view):,} bytes are missing at {begin:,}")


def _check(size: int, state: Any) -> None:
    """Raises `CheckpointError` if values claim more than a file of this size may, or have a type that is not saved."""
    counted = _Counted(size)
    written = counted.add("", "", state)
    if written > _REPEATED * counted.there + _SHARED:
        raise CheckpointError(f"is refused: of {counted.there:,} bytes, its values have {written:,} where repeated")


class _Counted:
    """Counts bytes of values: `there`, each object once, and in the results of `add`, once for each reference.

    Both are needed: a few nested lists that hold the same list several times are small in a file and in memory, and
    as large as 9^9 values for code that walks through them.

    Args:
        size: the file's size.
    """

    def __init__(self, size: int) -> None:
        self.size, self.there, self.claimed = size, 0, 0
        self.known = dict[int, int]()  # bytes by the id of a collection or text; 0 while it is being counted

    def add(self, name: str, key: Any, value: Any, depth: int = 0) -> int:
        """Counts the part `key` of the value with this name."""
        self.there += _VALUE
        if type(value) in _NUMBERS:
            return _VALUE
        # By id: all values are alive as long as the count, so no id is used twice.
        if id(value) in self.known:
            if not self.known[id(value)]:
                raise CheckpointError(f"is refused: {name_within(name, key)} holds itself")
            return self.known[id(value)]
        self.known[id(value)], found = 0, _VALUE
        if type(value) in (str, bytes):
            self.there += len(value)
            found += len(value)
        elif type(value) in _TENSORS:
            self._claim(name_within(name, key), value)
        # An array's bytes were counted when it was made, and hold numbers alone.
        elif type(value) is not np.ndarray:
            name, parts = name_within(name, key), parts_of(value)
            if parts is None:
                raise CheckpointError(
                    f"is refused: {name or 'it'} is {type(value).__name__}, which no checkpoint needs"
                )
            if depth > _DEPTH:
                raise CheckpointError(f"is refused: {name} is nested more than {_DEPTH} levels deep")
            for part, x in parts:
                found += self.add(name, part, x, depth + 1)
                found += 0 if type(part) is int else self.add(name, part, part, depth + 1)
        self.known[id(value)] = found
        return found

    def _claim(self, name: str, tensor: torch.Tensor) -> None:
        """Counts a tensor that is larger than its storage, as an expanded one is: it may claim any size."""
        self.claimed += tensor.nbytes if tensor.nbytes > tensor.untyped_storage().nbytes() else 0
        if self.claimed > max(self.size, _EXPANDED):
            shape = tuple(tensor.shape)
            raise CheckpointError(
                f"is refused: {name} has shape {shape}, {tensor.nbytes:,} bytes; the file has {self.size:,}"
            )
