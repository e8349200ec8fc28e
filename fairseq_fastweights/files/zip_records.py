"""The records of a zip archive of `torch.save`: one list for the checks, the digests and the loader.

Two programs can find different records in one file: by two directories, by names in capitals, or by a length that
stands in two places with two values. Here a length or name in two places must be the same in both, and anything that
`torch.save` never writes is refused. The module imports Python's standard library alone, so that
`tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, NamedTuple

_HEADER, _ENTRY, _END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
_END64, _LOCATOR64 = b"PK\6\6", b"PK\6\7"
_FLAGS = 0x0808  # sizes follow the bytes; the name is UTF-8
_SIZES_FOLLOW, _FOLDER, _STORED = 0x0008, 0x10, 0
_LONGEST = 100
"""Characters of a name in a message."""
_MOST16, _MOST32 = 2**16 - 1, 2**32 - 1


class CheckpointError(ValueError):
    """A file is damaged, no checkpoint, or asks for more than it holds; the message's words follow the file's name."""


class Record(NamedTuple):
    """A record: its name within the archive's folder, the place of its bytes, and their CRC-32 in the directory."""

    name: str
    begin: int
    size: int
    crc: int


def is_archive(file: BinaryIO) -> bool:
    """True if an open file begins as zip archives do."""
    file.seek(0)
    return file.read(len(_HEADER)) == _HEADER


def records_in(file: BinaryIO) -> dict[str, Record]:
    """The records of an open archive, by name.

    Raises:
        CheckpointError: if it differs from an archive of `torch.save`, so that programs could read it differently.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        begin, count, directory = _directory(file, size)
        records = _records(file, begin, count, directory)
    except (struct.error, UnicodeDecodeError):
        raise CheckpointError("is cut short or damaged: the directory at its end cannot be read") from None
    # In the order of their headers no record may reach into the next one.
    end = 0
    for at, record in sorted(records):
        if at < end or record.begin + record.size > begin:
            raise CheckpointError(f"is damaged: its record {record.name[:_LONGEST]} overlaps another, or the directory")
        end = record.begin + record.size
    folders = {record.name.partition("/")[0] for _, record in records}
    if len(folders) > 1 or len({record.name.lower() for _, record in records}) < len(records):
        raise CheckpointError("is damaged: its records are not in one folder, or two have the same name")
    named = (record._replace(name=record.name.partition("/")[2]) for _, record in records)
    return {record.name: record for record in named}


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    if at < 0:
        raise struct.error
    file.seek(at)
    return file.read(size)


def _directory(file: BinaryIO, size: int) -> tuple[int, int, bytes]:
    """The place of the directory, its number of records, and its bytes; `struct.error` if it cannot be read."""
    # The archive's last 22 bytes: no comment follows.
    end = size - 22
    magic, *disks, here, count, length, begin, comment = struct.unpack("<4s4HIIH", _read(file, end, 22))
    if magic != _END or any(disks) or here != count or comment:
        raise struct.error
    # Before them, in archives with zip64: the end record of 56 bytes and its locator of 20, which `torch.save` writes
    # where a number needs more than 32 bits; the numbers that fit must be the same in both end records.
    locator = _read(file, end - 20, 20) if end >= 76 else b""
    if locator.startswith(_LOCATOR64):
        at = end - 76
        if struct.unpack("<IQI", locator[4:]) != (0, at, 1):
            raise struct.error
        magic, rest, _, _, *disks, here, count64, length64, begin64 = struct.unpack("<4sQ2H2I4Q", _read(file, at, 56))
        if (magic, rest, here) != (_END64, 44, count64) or any(disks):
            raise struct.error
        shown = min(count64, _MOST16), min(length64, _MOST32), min(begin64, _MOST32)
        if shown != (count, length, begin):
            raise struct.error
        end, count, length, begin = at, count64, length64, begin64
    if begin + length != end:
        raise struct.error
    return begin, count, _read(file, begin, length)


def _records(file: BinaryIO, end: int, count: int, directory: bytes) -> list[tuple[int, Record]]:
    """All records, each with the place of its header."""
    records, at = list[tuple[int, Record]](), 0
    while at < len(directory):
        magic, _, _, flags, method, _, _, crc, *lengths, disk, _, attributes, header = struct.unpack_from(
            "<4s6HIIIHHHHHII", directory, at
        )
        packed, size, name_size, extra_size, comment_size = lengths
        at += 46
        name, extra = directory[at : at + name_size], directory[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size + comment_size
        if magic != _ENTRY or disk or comment_size or at > len(directory):
            raise struct.error
        text = _decoded(name)
        shown = text[:_LONGEST]
        size, packed, header = _sizes64(extra, size, packed, header)
        if method != _STORED or packed != size:
            raise CheckpointError(f"is damaged: its record {shown} is compressed, which torch.save never does")
        if flags & ~_FLAGS or attributes & _FOLDER:
            raise CheckpointError(f"is damaged: its record {shown} is encrypted or a folder; torch.save writes neither")
        begin = _begin(file, header, (name, flags, size, crc), shown)
        if begin + size > end:
            raise CheckpointError(
                f"is damaged: its record {shown} has {size:,} bytes; the file has no more than {end:,}"
            )
        records.append((header, Record(text, begin, size, crc)))
    if len(records) != count:
        raise struct.error
    return records


def _decoded(name: bytes) -> str:
    text = name.decode()
    if not text.isprintable() or "/" not in text[:-1] or text.endswith("/"):
        raise CheckpointError(f"is damaged: its record {text[:_LONGEST]!a} has no name that torch.save gives")
    return text


def _sizes64(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Size, packed size and place of a record, from the zip64 field (id 1) where they need more than 32 bits."""
    if _MOST32 not in (size, packed, header):
        return size, packed, header
    at = 0
    while struct.unpack_from("<H", extra, at)[0] != 1:
        at += 4 + struct.unpack_from("<H", extra, at + 2)[0]
    (length,) = struct.unpack_from("<H", extra, at + 2)
    numbers = list(struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length]))
    found = [numbers.pop(0) if x == _MOST32 and numbers else x for x in (size, packed, header)]
    return found[0], found[1], found[2]


def _begin(file: BinaryIO, header: int, entry: tuple[bytes, int, int, int], shown: str) -> int:
    """The place of a record's bytes: after its header, which must agree with its entry in the directory."""
    name, flags, size, crc = entry
    content = _read(file, header, 30 + len(name))
    if len(content) < 30 or not content.startswith(_HEADER):
        raise CheckpointError(f"is damaged: its record {shown} is not where the directory says")
    _, here_flags, method, _, _, here_crc, packed, here_size, name_size, extra_size = struct.unpack(
        "<HHHHHIIIHH", content[4:30]
    )
    if name_size != len(name) or content[30:] != name:
        raise CheckpointError(f"is damaged: its record {shown} is called {content[30:90]!r} where it stands")
    # `torch.save` may write sizes and CRC after the bytes; the header then has zeros, or 2^32 - 1 with zip64.
    sizes = (
        {(0, 0, 0), (0, _MOST32, _MOST32)} if flags & _SIZES_FOLLOW else {(crc, size, size), (crc, _MOST32, _MOST32)}
    )
    if (here_flags, method) != (flags, _STORED) or (here_crc, packed, here_size) not in sizes:
        raise CheckpointError(f"is damaged: its record {shown} has another size or kind where it stands")
    return header + 30 + name_size + extra_size
