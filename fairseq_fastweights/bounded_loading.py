"""Reads files of `torch.save` by the safe loader, without using more memory than a small multiple of their size.

The safe loader runs no code, but it believes what a file says about sizes: it inflates records, and makes an array of
as many bytes as it is asked for. What could ask for more than the file holds is refused before it is loaded; what was
loaded is compared with the file's size before anything is done with it. It knows torch alone, so that
`tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zipfile
from typing import Any, BinaryIO

import torch

# Relative, to be found in fairseq, too.
from .digests import name_within, parts_of, tensors_in

_ZIP = b"PK\x03\x04"
_EXPANDED = 2**26
"""Bytes that expanded tensors may claim in files of any size."""
_COPIES = 2**20
"""Characters that a pickle may repeat in files of any size."""
_DEPTH = 100
"""The deepest nesting of plain values: what handles them calls itself for each level."""
_SHARED = 10_000
"""How many plain values may be there by reference alone, in files of any size."""
_MAKERS = ("bytearray", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy")
"""What the safe loader would call, that makes much of little."""
_PICKLES = 5
"""How many pickles there are in a file of the format of before torch 1.6, before its numbers."""


class TooLargeError(ValueError):
    """A file asks for more than it could hold; the message's words follow the file's name."""


def load(file: BinaryIO, mapped: str | os.PathLike[str] | None = None) -> Any:
    """The contents of an open file of `torch.save`, on the CPU.

    Args:
        file: the file, at its beginning.
        mapped: its path, for numbers to be read only once they are needed, if it is an archive; None to read all.

    Raises:
        TooLargeError: if it asks for more than it could hold.
        Exception: whatever torch raises, if it is damaged or holds something else than tensors and plain values.
    """
    size, archive = os.fstat(file.fileno()).st_size, is_archive(file)
    if reason := why_inflated(file) if archive else _why_copied(file, _PICKLES):
        raise TooLargeError(reason)
    if mapped is not None and archive:
        state = torch.load(mapped, map_location="cpu", weights_only=True, mmap=True)
    else:
        state = torch.load(file, map_location="cpu", weights_only=True)
    if reason := _why_absurd(size, state):
        raise TooLargeError(f"is refused: {reason}")
    return state


def is_archive(file: BinaryIO) -> bool:
    """True if an open file begins as zip archives do; it is then where it was."""
    at = file.tell()
    file.seek(0)
    start = file.read(len(_ZIP))
    file.seek(at)
    return start == _ZIP


def why_inflated(file: BinaryIO) -> str | None:
    """Why an archive is not to be read: it would be more than there is of it; the file is then where it was."""
    at = file.tell()
    try:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except Exception:  # what it raises depends on where the directory is damaged
        return "is cut short or damaged: the directory at its end cannot be read"
    finally:
        file.seek(at)
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            return f"is damaged: its record {record.filename} is compressed, which torch.save never does"
    claimed, size = sum(record.file_size for record in records), os.fstat(file.fileno()).st_size
    if claimed > size:
        return f"is damaged: its records have {claimed:,} bytes together; the file has {size:,}"
    for record in records:
        if record.filename.endswith("data.pkl"):
            file.seek(record.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4).ljust(4, b"\0"))  # of the name, and of what fills up
            file.seek(sum(lengths), os.SEEK_CUR)
            pickle = io.BytesIO(file.read(record.file_size))
            file.seek(at)
            if reason := _why_copied(pickle, 1):
                return reason
    return None


def _why_copied(file: BinaryIO, pickles: int) -> str | None:
    """Why pickles, one after the other, are not to be read; the file is then where it was.

    A string is there once and referred to from then on. What is made of each reference, as the bytes of an array are,
    has its size again.
    """
    start, repeated, last, known = file.tell(), 0, 0, dict[Any, int]()
    try:
        for _ in range(pickles):
            for code, value, _ in pickletools.genops(file):
                if code.name == "GLOBAL" and str(value).endswith(_MAKERS):
                    return f"is refused: it asks for {str(value).replace(' ', '.')}, which no checkpoint needs"
                if code.name.endswith("BINPUT"):
                    known[value] = last
                elif code.name.endswith("BINGET"):
                    repeated += known.get(value, 0)
                last = len(value) if isinstance(value, str) and code.name != "GLOBAL" else 0
        if repeated > max(_COPIES, file.tell() - start):
            return f"is refused: its strings have {repeated:,} characters where they are repeated"
    except Exception:  # the safe loader, which stops at the same places, says what is wrong
        return None
    finally:
        file.seek(start)
    return None


def _why_absurd(size: int, state: Any) -> str | None:
    """Why what a file of this size held is not to be used: it claims more, or is what nothing that is saved is."""
    known = dict[int, tuple[int, int]]()
    try:
        written, _ = _count_values("", state, known)
    except TooLargeError as error:
        return str(error)
    there = sum(parts for _, parts in known.values())
    if written > 8 * there + _SHARED:
        return f"of its {there:,} values there are {written:,} where they are repeated"
    seen, held, claimed = set(), 0, 0
    for name, tensor in tensors_in(state):
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return f"{name} is {'quantized' if tensor.is_quantized else 'sparse or nested'}; it must be a plain tensor"
        if tensor.is_meta:
            return f"{name} has shape {tuple(tensor.shape)}, and no numbers"
        storage = tensor.untyped_storage()
        held += storage.nbytes() if storage.data_ptr() not in seen else 0
        seen.add(storage.data_ptr())
        # A tensor whose numbers repeat those of a smaller storage may claim any size: most that are meant do not.
        claimed += tensor.nbytes if tensor.nbytes > storage.nbytes() else 0
        if held > size or claimed > max(size, _EXPANDED):
            return f"{name} has shape {tuple(tensor.shape)}, {tensor.nbytes:,} bytes; the file has {size:,}"
    return None


def _count_values(name: str, value: Any, known: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """How many plain values there are where those that are repeated count each time, and how many parts it has.

    `known` gets those of all collections.
    """
    parts = parts_of(value)
    if parts is None:
        return 1, 0
    if id(value) not in known:
        if depth > _DEPTH:
            raise TooLargeError(f"{name} is nested more than {_DEPTH} levels deep")
        known[id(value)] = 0, 0
        written = [_count_values(name_within(name, key), x, known, depth + 1)[0] for key, x in parts]
        known[id(value)] = 1 + sum(written), len(written)
    elif not known[id(value)][0]:
        raise TooLargeError(f"{name} holds itself")
    return known[id(value)]
