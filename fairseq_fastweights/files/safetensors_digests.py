"""Weights in files of transformers' models: digests in safetensors files, and the weights in files of torch.save.

A safetensors file has no checksum of its own; a digest is under "digest" in its metadata.

A digest covers the names, types, shapes and bytes of the file's tensors, in any order. Programs that change weights
write files without a digest, as they leave out metadata that they do not know.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_fastweights.files.digests import crc32
from fairseq_fastweights.files.integrity import load_checked, why_not_regular
from fairseq_fastweights.invalid_input import InvalidInput

_METADATA, _DIGEST = "__metadata__", "digest"


def note_digest(path: Path) -> None:
    """Writes the digest of a file's tensors into its metadata.

    Raises:
        OSError: if it cannot be written.
    """
    header, begin = _read_header(path)
    header[_METADATA] = {**header.get(_METADATA, {}), _DIGEST: _digest(path, header, begin)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for tensors at multiples of 8 bytes
    # The header has another length, so the whole file is written anew.
    beside = path.with_name(f"{path.name}.tmp")
    beside.unlink(missing_ok=True)  # a link, which would name a file elsewhere
    with path.open("rb") as old, beside.open("xb") as new:
        new.write(struct.pack("<Q", len(text)) + text)
        old.seek(begin)
        shutil.copyfileobj(old, new, 2**20)
    os.replace(beside, path)


def why_damaged(path: str | os.PathLike[str]) -> str | None:
    """The damage of a file, in words that follow its name; None if its digest is right or missing.

    Raises:
        OSError: if it cannot be read.
    """
    if kind := why_not_regular(path):
        return kind
    try:
        header, begin = _read_header(Path(path))
        noted = header.get(_METADATA, {}).get(_DIGEST)
        if noted is None or _digest(Path(path), header, begin) == noted:
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "is cut short or damaged: its header does not fit its size"
    return "is damaged: its weights do not have the digest in its metadata; it must be downloaded or written again"


def described_in(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The types and shapes of the weights in an undamaged file, by name.

    Raises:
        ValueError: if its header says something else.
        OSError: if it cannot be read.
    """
    header, _ = _read_header(path)
    try:
        found = {
            name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in header.items() if name != _METADATA
        }
    except (KeyError, TypeError):
        raise InvalidInput(f"{path} is damaged: its header does not give each weight a type and a shape") from None
    return found


def weights_in_pickle(path: Path) -> dict[str, Tensor]:
    """The weights in an undamaged file of torch.save.

    Raises:
        ValueError: if it is damaged, or holds anything but weights by name.
        OSError: if it cannot be read.
    """
    if kind := why_not_regular(path):
        raise InvalidInput(f"{path} {kind}")
    with path.open("rb") as file:
        content = load_checked(file, path, mapped=True)
    if not isinstance(content, dict):
        raise InvalidInput(f"{path}: refused: it holds {type(content).__name__}, not weights by name")
    for name, weight in content.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor):
            raise InvalidInput(f"{path}: refused: it holds {type(weight).__name__} under {name!r}, not weights by name")
    return content


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Reads a file's header: the description of its tensors by name, and the position of their bytes.

    A file is the header's length (uint64), the header in JSON, and the tensors' bytes.
    """
    with path.open("rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if len(start) < 8 or size > os.fstat(file.fileno()).st_size - 8:
            raise InvalidInput("no header")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise InvalidInput("a header of another kind")
    return header, 8 + size


def _digest(path: Path, header: dict[str, Any], begin: int) -> str:
    found = hashlib.sha256()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        # In the order of names: programs write tensors in any order.
        for name in sorted(header.keys() - {_METADATA}):
            tensor = header[name]
            first, last = tensor["data_offsets"]
            with view[begin + first : begin + last] as numbers:
                if len(numbers) != last - first:
                    raise InvalidInput(f"{name} is cut short")
                told = (name, tensor["dtype"], tensor["shape"], crc32(numbers))
            found.update(json.dumps(told).encode())
    return found.hexdigest()[:16]
