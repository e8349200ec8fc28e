"""Identifies a score, so that an old one never passes for that of another model, other data or other options."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_KERNELS = ("FASTWEIGHTS_NATIVE", "FASTWEIGHTS_CPU_ISA", "FASTWEIGHTS_CUDA_ALGORITHM")
"""Variables of the environment that choose them begin so."""


def digest_of(files: Iterable[Path]) -> str:
    """A digest of the names, sizes and contents of files."""
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            digest.update(f"{path.name} {os.fstat(file.fileno()).st_size}\n".encode())
            while chunk := file.read(2**20):
                digest.update(chunk)
    return digest.hexdigest()[:32]


def split_files(data: Path, split: str) -> list[Path]:
    """The files of a folder of data that are read to score a split of it."""
    patterns = ("dict*.txt", "words.json", "subwords.*", f"{split}.*", f"{split}[0-9]*", f"raw/{split}.*")
    return [path for pattern in patterns for path in data.glob(pattern) if path.is_file()]


def identity(checkpoint: Path, data: Iterable[Path]) -> dict[str, str]:
    """Digests of the files that an evaluation reads, and the choice of kernels in the environment."""
    kernels = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_KERNELS))
    return {
        "model": digest_of([checkpoint]),
        "data": digest_of(data),
        "kernels": " ".join(kernels),
    }


def difference(noted: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """How a noted score's identity differs from this one, in words; "" if it does not."""
    if noted is None:
        return "does not say what it is of"
    different = [name for name in now if noted.get(name) != now[name]]
    return f"is of other {' and '.join(different)}" if different else ""
