"""The digest of a checkpoint's weights, which the checkpoint holds under "digests", beside "model".

The CRC-32 of each record of a zip archive shows damage of the file. The digest also shows that a program loaded a
damaged file and saved its weights again, with right CRCs; and damage in the format from before torch 1.6, which has no
CRCs. It covers the names, types, shapes and bytes of the weights, in their order, in either format. It includes bytes
by their CRC-32, which is fast and detects every burst of up to 32 bits; it is no proof against intent. isal computes
CRCs five to ten times as fast as zlib, which takes its place where isal is not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

DIGESTS = "digests"
"""The key of the digests in a checkpoint."""

THREADS = min(8, os.cpu_count() or 1)
"""CRCs that are computed in parallel: they release Python's lock."""

_COLLECTIONS = (dict, argparse.Namespace, list, tuple, set, frozenset)
_LONGEST, _LONGEST_TEXT = 200, 10_000
"""Characters of a tensor's name and of each of its parts, as a file may nest keys of any length; of a short string."""


def with_digests(state: Any) -> Any:
    """A checkpoint, to be saved, with the digest of its weights; other objects as they are."""
    if not isinstance(state, dict) or "model" not in state:
        return state
    # "model" is part of a longer string: a pickle holds equal strings once, and a flipped bit would change both.
    return {**state, DIGESTS: [f"model {model_digest(state['model'])}"]}


def model_digest(model: Any, crcs: dict[tuple[int, int], int] | None = None) -> str:
    """The digest of a model's weights.

    Args:
        model: the weights by name.
        crcs: the result of `storage_crcs`, if it is known.
    """
    return hashlib.sha256(_fingerprint(model, storage_crcs(model) if crcs is None else crcs)).hexdigest()[:16]


def is_changed(state: Any, crcs: dict[tuple[int, int], int] | None = None) -> bool | None:
    """True if a checkpoint's weights have another digest than the one in it; None if there is none in it."""
    if not isinstance(state, dict) or DIGESTS not in state:
        return None
    noted = state[DIGESTS]
    return not isinstance(noted, list) or f"model {model_digest(state.get('model'), crcs)}" not in noted


def storage_crcs(state: Any) -> dict[tuple[int, int], int]:
    """The CRC-32 of the storages, on the CPU, of all tensors within a checkpoint, by address and size."""
    tensors = (x for _, x in tensors_in(state) if x.layout is torch.strided and x.device.type == "cpu")
    storages = {(x.data_ptr(), x.nbytes()): x for x in (tensor.untyped_storage() for tensor in tensors)}
    with ThreadPoolExecutor(THREADS) as pool:
        crcs = pool.map(lambda x: _crc(torch.empty(0, dtype=torch.uint8).set_(x)), storages.values())
        return dict(zip(storages, crcs, strict=True))


def _crc(tensor: torch.Tensor) -> int:
    return crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _fingerprint(value: Any, crcs: dict[tuple[int, int], int]) -> bytes:
    if isinstance(value, torch.Tensor):
        parts = [b"tensor", _tensor_fingerprint(value, crcs)]
    elif isinstance(value, dict):
        parts = [b"dict", *(_fingerprint(x, crcs) for entry in value.items() for x in entry)]
    elif isinstance(value, _COLLECTIONS):
        parts = [type(value).__name__.encode(), *(_fingerprint(x, crcs) for _, x in parts_of(value) or ())]
    elif isinstance(value, str) and len(value) > _LONGEST_TEXT:  # which repr could make ten times as long
        parts = [b"text", value.encode("utf-8", "surrogatepass")]
    else:
        return repr(value).encode()
    # Each part with its length, so that no two lists of parts give the same bytes.
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()


def _tensor_fingerprint(tensor: torch.Tensor, crcs: dict[tuple[int, int], int]) -> bytes:
    described = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return described.encode()
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    # Plain tensors that fill their storage have the storage's CRC; others, such as slices, are computed by themselves.
    crc = crcs.get((tensor.data_ptr(), tensor.nbytes)) if plain else None  # of its whole storage
    crc = _crc(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()) if crc is None else crc
    return f"{described} {crc}".encode()


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
        parts = parts_of(value) or ()
        stack += [(name_within(name, key), x) for key, x in parts if isinstance(x, (torch.Tensor, *_COLLECTIONS))]


def parts_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a collection, by keys or indices; None for any other value."""
    if isinstance(value, OrderedDict) and vars(value):  # the versions of modules, which torch notes beside weights
        return [*value.items(), *vars(value).items()]
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, argparse.Namespace):
        return vars(value).items()
    return enumerate(value) if isinstance(value, _COLLECTIONS) else None


def name_within(name: str, key: Any) -> str:
    """The name of a part, as "model.weight", cut to the length of a message."""
    shown = str(key)[:_LONGEST]
    return f"{name[:_LONGEST]}.{shown if shown.isprintable() else ascii(shown)}".lstrip(".")
