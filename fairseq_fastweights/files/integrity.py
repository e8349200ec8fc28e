"""Checks that a checkpoint is, byte by byte, what was written: damage is noticed before any number of it is used.

`torch.save` notes a CRC-32 of each record of the zip archive that it writes, which `torch.load` never looks at. So a
program can load a damaged checkpoint and save it again with CRCs that are right. What this project writes therefore
has a digest of its weights, too (`digests`), which such a program keeps; so does one that changes weights on purpose:
where the digest is another and the CRCs are right, that is a warning and no error. The format of before torch 1.6 has
no CRCs: there the digest shows damage of weights, and other damage shows only where it cannot be read.

This notices accidents, not intent: whoever can change a file can write what fits it. It knows torch and NumPy alone, so
that `tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

# Relative, to be found in fairseq, too: there all of them are in one folder.
from ..suggestions import ArgumentParser
from .bounded_loading import load, outline
from .digests import DIGESTS, THREADS, crc32, is_changed, model_digest, storage_crcs
from .text_files import FileError
from .zip_records import CheckpointError, Record, is_archive, records_in

logger = logging.getLogger(__name__)

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_OTHER_DIGEST = "is damaged: what it holds under model has not the digest that is noted"
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


def why_damaged(path: str | os.PathLike[str], look: Callable[[BinaryIO], str | None] | None = None) -> str | None:
    """The damage of a checkpoint, or any file of `torch.save`: words that follow its name; None for a whole one.

    Args:
        path: the file.
        look: finds the damage of an open file; None for `damage_of`.

    Examples:
        >>> why_damaged("no/such/checkpoint.pt"), why_damaged("/dev/null")
        ('does not exist', 'is a device; it must be a regular file')
    """
    try:
        if kind := why_not_regular(path):
            return kind
        with open(path, "rb") as file:
            return (look or damage_of)(file)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def why_not_regular(path: str | os.PathLike[str]) -> str | None:
    """Why a path is not to be opened: a pipe lets whoever opens it wait, a device has no end.

    Raises:
        OSError: if there is nothing.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        return None
    kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(mode)), "something else")
    return f"is {kind}; it must be a regular file"


def damage_of(file: BinaryIO, loaded: Mapping[tuple[int, int], int] | None = None) -> str | None:
    """As `why_damaged`, of an open file, which is then where it was.

    Args:
        file: the open file.
        loaded: the CRCs of what was just loaded of it, from `storage_crcs`; these records are not read again.

    Raises:
        OSError: if it cannot be read.
    """
    at = file.tell()
    try:
        file.seek(0)
        start = file.read(len(_ZIP))
        file.seek(0)
        if not start:
            return "is empty (0 bytes)"
        if start == _ZIP:
            return _damage_of_archive(file, loaded or {})
        if start.startswith(_PICKLE):
            return _damage_of_pickle(file)
        return f"is damaged or no checkpoint: it begins with {start!r}"
    finally:
        file.seek(at)


def _damage_of_archive(file: BinaryIO, loaded: Mapping[tuple[int, int], int]) -> str | None:
    try:
        records = list(records_in(file).values())
    except CheckpointError as error:
        return str(error)
    if not any(record.crc for record in records):
        return None  # as torch.serialization.set_crc32_options(False) lets torch write it
    with (
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        complaints = list(pool.map(partial(_damage_of_record, view), records, _are_loaded(records, loaded)))
    found = (f"its record {x.name} {said}" for x, said in zip(records, complaints, strict=True) if said)
    return next((f"is damaged: {first}" for first in found), None)


def _are_loaded(records: list[Record], loaded: Mapping[tuple[int, int], int]) -> list[bool]:
    """True for each record that matches what was loaded: as many storages with its CRC as records."""
    found = Counter((size, crc) for (_, size), crc in loaded.items())
    noted = Counter((record.size, record.crc) for record in records)
    return [found[key] >= noted[key] for key in ((record.size, record.crc) for record in records)]


def _damage_of_record(view: memoryview, record: Record, is_loaded: bool) -> str | None:
    found = record.crc if is_loaded else crc32(view[record.begin : record.begin + record.size])
    if found != record.crc:
        return f"is not what was written (CRC-32 {found:08x}, and noted is {record.crc:08x})"
    return None


def _damage_of_pickle(file: BinaryIO) -> str | None:
    try:
        return _OTHER_DIGEST if is_changed(load(file)) else None
    except CheckpointError as error:
        return str(error)


def whole_checkpoints(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """The checkpoints in a folder, `*.pt`, that are whole: that of the most updates first.

    Those of as many, and those that do not tell, are in the order of their dates, the newest first. Each is read, once
    it is asked for, from beginning to end.
    """
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.name.endswith(".pt") and entry.is_file()]
    keys = {entry: (num_updates(entry.path), entry.stat().st_mtime_ns, entry.name) for entry in found}
    for entry in sorted(found, key=lambda entry: keys[entry], reverse=True):
        if why_damaged(entry.path) is None:
            yield Path(entry.path)


def num_updates(path: str | os.PathLike[str]) -> int:
    """The number of updates of a checkpoint from which a training can go on; -1 for any other file.

    Files' dates do not tell: a copy has a new one, and a clock may be wrong. No tensor is read, and nothing that the
    file names is called or imported.

    Examples:
        >>> num_updates("no/such/checkpoint.pt")
        -1
    """
    try:
        with open(path, "rb") as file:
            state = outline(file)
        number = state["optimizer_history"][-1]["num_updates"]
        return number if type(number) is int and "train_iterator" in state["extra_state"] else -1
    except Exception:  # what a damaged file raises depends on where it is damaged
        return -1


def complain(path: str | os.PathLike[str], reason: str) -> str:
    """One line about a checkpoint with which something is wrong, `why_damaged`: what to go on from in its place."""
    folder = Path(path).parent
    others = [other for other in folder.glob("*.pt") if other.is_file() and not _same(other, path)]
    whole = next((other for other in whole_checkpoints(folder) if not _same(other, path)), None) if others else None
    if whole is not None:
        reason += f"; the newest whole one beside it is {whole.name}: --restore-file {whole}"
    elif others:
        reason += f"; of {len(others)} more in {folder} none is whole"
    return f"{path} {reason}"


def _same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def load_checked(file: BinaryIO, path: str | os.PathLike[str], mapped: bool = False) -> Any:
    """The content of an open checkpoint, compared with its CRCs and its digest, without the latter.

    Args:
        file: the open file.
        path: by which the user knows it.
        mapped: as `load` has it.

    Raises:
        FileError: one line, naming the file, what is wrong with it and what to go on from, if it is not to be loaded.
    """
    try:
        state = load(file, mapped)
    except CheckpointError as error:
        damage = damage_of(file) if is_archive(file) else None
        raise FileError(complain(path, damage or str(error))) from None
    check_loaded(file, path, state)
    return state


def check_loaded(file: BinaryIO, path: str | os.PathLike[str], state: Any) -> None:
    """Compares the CRCs and the digest of a checkpoint with what was just loaded, and takes the digest out of it.

    Args:
        file: the open file.
        path: by which the user knows it.
        state: what it holds.

    Raises:
        FileError: one line, naming the file, what is wrong with it and what to go on from, if it is damaged.
    """
    crcs, archive = storage_crcs(state), is_archive(file)
    if archive and (damage := damage_of(file, crcs)):
        raise FileError(complain(path, damage))
    changed = is_changed(state, crcs)
    if isinstance(state, dict):
        state.pop(DIGESTS, None)
    if changed and not archive:
        raise FileError(complain(path, _OTHER_DIGEST))
    if changed:
        logger.warning(
            "%s: its digest of model is not that of what it holds. A program changed it after training, as one that "
            "averages checkpoints does, or it was damaged before it was written",
            path,
        )


def why_no_numbers(weights: Mapping[str, Any]) -> str | None:
    """Says which of a model's weights holds NaN; None if none does."""
    for name, weight in weights.items():
        # fairseq's `_float_tensor` tells a device and a type; nothing is ever written to it, so it may hold anything.
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or name.endswith("_float_tensor"):
            continue
        # A sum takes a fraction of the time, and is NaN or infinite where a number is.
        if not weight.sum(dtype=torch.float32).isfinite() and weight.isnan().any():
            return f"its weight {name} holds NaN (not a number), as those of a training that diverged"
    return None


def describe(path: str | os.PathLike[str]) -> tuple[bool, str]:
    """True if a checkpoint is whole, and a line about it, with the digest of its weights."""
    found = []

    def look(file: BinaryIO) -> str | None:
        if damage := damage_of(file):
            return damage
        try:
            found.append(_content(load(file, mapped=True)))
        except CheckpointError as error:
            return str(error)
        return None

    if damage := why_damaged(path, look):
        return False, complain(path, damage)
    return True, f"{path} is whole; {found[0]}"


def _content(state: Any) -> str:
    if not isinstance(state, dict) or "model" not in state:
        return f"it holds {type(state).__name__}, no model"
    noted = {None: "none is noted", False: "as noted", True: "another one is noted"}[is_changed(state)]
    return f"digest of its model ({noted}): {model_digest(state['model'])}"


def main(arguments: list[str] | None = None) -> int:
    """Looks at checkpoints: `python -m fairseq_fastweights.files.integrity FILE...`; 1 if one is damaged."""
    parser = ArgumentParser(
        prog="python -m fairseq_fastweights.files.integrity",
        description="Says whether checkpoints are whole, and shows the digests of their weights.",
    )
    parser.add_argument("file", nargs="+", help="a checkpoint")
    described = [describe(path) for path in parser.parse_args(arguments).file]
    print("\n".join(line for _, line in described))
    return 0 if all(whole for whole, _ in described) else 1


if __name__ == "__main__":
    sys.exit(main())
