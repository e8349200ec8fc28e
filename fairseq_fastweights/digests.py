"""Digests of a checkpoint's content, which are kept in it, under "digests" beside "model".

Each is of one part of the checkpoint: of the names, types, shapes and bytes of its tensors and of all its plain values,
in their order, whatever the format of the file. Bytes count by their CRC-32, which is fast and misses no accident of up
to 32 bits in a row; it is no proof against intent. isal works it out five to ten times as fast as zlib, which does
where isal is not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

DIGESTS = "digests"
"""What they are under in a checkpoint."""

THREADS = min(8, os.cpu_count() or 1)
"""How many CRCs are worked out at once: they let go of Python's lock."""

_LONGEST = 200
"""Characters of a tensor's name and of each of its parts: a file may nest keys of any length."""


def with_digests(state: Any) -> Any:
    """A checkpoint, to be saved, with digests of all that is in it; other objects as they are."""
    if not isinstance(state, dict) or "model" not in state:
        return state
    # No part's name stands alone: a pickle would have the string once, and one flipped bit in it would change both.
    return {**state, DIGESTS: [f"{name} {digest}" for name, digest in digests(state).items()]}


def digests(state: dict[str, Any]) -> dict[str, str]:
    """The digests of a checkpoint's parts, by name; a part that is None has none."""
    seen, crcs = dict[int, bytes](), _crcs(state)
    parts = {str(name): part for name, part in state.items() if name != DIGESTS and part is not None}
    return {name: hashlib.sha256(_fingerprint(part, seen, crcs)).hexdigest()[:16] for name, part in parts.items()}


def _fingerprint(value: Any, seen: dict[int, bytes], crcs: dict[Any, bytes]) -> bytes:
    """The digest of one value; a value of none of these types counts by the name of its type alone."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        value = value.item()  # as the safe loader reads it
    if value is None or type(value) in (str, int, float, bool, bytes, complex, torch.Size, torch.dtype, torch.device):
        return repr(value).encode()
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = b"within itself"
    if isinstance(value, torch.Tensor):
        parts = [b"tensor", _tensor_fingerprint(value, crcs)]
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))  # as NumPy's own unpickling makes it
        parts = [b"array", f"{native.dtype.str} {value.shape} {crc32(native.data)}".encode()]
    elif isinstance(value, (dict, argparse.Namespace)):
        entries = value.items() if isinstance(value, dict) else vars(value).items()
        parts = [b"dict", *(_fingerprint(x, seen, crcs) for entry in entries for x in entry)]
    elif isinstance(value, (list, tuple)):
        parts = [b"list" if isinstance(value, list) else b"tuple", *(_fingerprint(x, seen, crcs) for x in value)]
    elif isinstance(value, (set, frozenset)):
        parts = [b"set", *sorted(_fingerprint(x, seen, crcs) for x in value)]
    else:
        parts = [type(value).__qualname__.encode()]
    found = hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()
    seen[id(value)] = found
    return found


def _crcs(state: Any) -> dict[Any, bytes]:
    """The digests of the bytes of all tensors within it, by where they are: of tied weights one is enough."""
    plain = {}
    for _, tensor in tensors_in(state):
        if _has_bytes(tensor):
            numbers = _numbers(tensor)
            plain[_place(numbers)] = numbers
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(plain, pool.map(_crc, plain.values()), strict=True))


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a tensor has: itself, or the storage where its numbers stand for several each."""
    storage = tensor.untyped_storage()
    if tensor.nbytes <= storage.nbytes():
        return tensor.detach()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _crc(tensor: torch.Tensor) -> bytes:
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return b"%d" % crc32(plain.reshape(-1).view(torch.uint8).numpy().data)


def _tensor_fingerprint(tensor: torch.Tensor, crcs: dict[Any, bytes]) -> bytes:
    described = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    if not _has_bytes(tensor):
        return described.encode()
    numbers = _numbers(tensor)
    if numbers.shape != tensor.shape:
        described += f" {tensor.stride()}"
    return described.encode() + b" " + crcs[_place(numbers)]


def tensors_in(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors within a checkpoint, by name, each object once."""
    seen = set()
    stack = [("", state)]
    while stack:
        name, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield name, value
        stack += [(name_within(name, key), x) for key, x in parts_of(value) or ()]


def parts_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a plain value, by keys or numbers; None if it is no collection."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, argparse.Namespace):
        return vars(value).items()
    return enumerate(value) if isinstance(value, (list, tuple, set, frozenset)) else None


def name_within(name: str, key: Any) -> str:
    """The name of a part of what is called `name`; as short as a message needs."""
    return f"{name[:_LONGEST]}.{str(key)[:_LONGEST]}".lstrip(".")


def changed_parts(state: Any) -> list[str] | None:
    """The parts of a checkpoint of which it has other digests, or none; None if it has no digests at all."""
    if not isinstance(state, dict) or DIGESTS not in state:
        return None
    noted = state[DIGESTS]
    try:
        found = digests(state)
    except RecursionError:  # nothing that was saved with digests is nested so deeply
        found = {}
    told = dict(str(line).rpartition(" ")[::2] for line in noted) if isinstance(noted, list) else {}
    return sorted(name for name in {*found, *told} if found.get(name) != told.get(name))
