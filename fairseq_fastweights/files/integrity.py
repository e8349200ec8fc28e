"""Checks that a checkpoint is as it was written, byte by byte, before any of its numbers is used.

`torch.save` notes a CRC-32 of each record of the zip archive that it writes, and `torch.load` never compares them. So a
program can load a damaged checkpoint and save it again with CRCs that are right. Checkpoints of this project therefore
also have a digest of their weights (`digests`), which such a program keeps. A program that changes weights on purpose
keeps it, too: another digest with right CRCs is a warning, not an error. The format from before torch 1.6 has no CRCs:
there the digest shows damage of weights, and other damage shows only where it cannot be read.

This notices accidents, not intent: whoever can change a file can also make its CRCs and digest fit. The module imports
torch and NumPy alone, so that `tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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

_PICKLE = b"\x80"
_OTHER_DIGEST = "is damaged: what it holds under model has not the digest that is noted"
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


def why_damaged(path: str | os.PathLike[str]) -> str | None:
    """The damage of a checkpoint, or any file of `torch.save`: words that follow its name; None for an undamaged one.

    Examples:
        >>> why_damaged("no/such/checkpoint.pt"), why_damaged("/dev/null")
        ('does not exist', 'is a device; it must be a regular file')
    """
    try:
        if kind := why_not_regular(path):
            return kind
        with open(path, "rb") as file:
            return damage_of(file)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def why_not_regular(path: str | os.PathLike[str]) -> str | None:
    """The reason not to open a path: opening a pipe waits for a writer, and a device has no end.

    Raises:
        OSError: if there is nothing.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        return None
    kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(mode)), "something else")
    return f"is {kind}; it must be a regular file"


def damage_of(file: BinaryIO, loaded: Mapping[tuple[int, int], int] | None = None) -> str | None:
    """As `why_damaged`, of an open file, whose position stays.

    Args:
        file: the open file.
        loaded: the CRCs of storages that were just loaded, by address and size, from `storage_crcs`; the records of
            these storages are not read again.

    Raises:
        OSError: if it cannot be read.
    """
    at = file.tell()
    try:
        file.seek(0)
        start = file.read(4)
        if not start:
            return "is empty (0 bytes)"
        if is_archive(file):
            return _damage_of_archive(file, loaded or {})
        if start.startswith(_PICKLE):
            return _OTHER_DIGEST if is_changed(load(file)) else None
        return f"is damaged or no checkpoint: it begins with {start!r}"
    except CheckpointError as error:
        return str(error)
    finally:
        file.seek(at)


def _damage_of_archive(file: BinaryIO, loaded: Mapping[tuple[int, int], int]) -> str | None:
    records = list(records_in(file).values())
    if not any(record.crc for record in records):
        return None  # as torch.serialization.set_crc32_options(False) lets torch write it
    # A record was loaded undamaged if as many storages have its size and CRC as records do.
    storages = Counter((size, crc) for (_, size), crc in loaded.items())
    noted = Counter((record.size, record.crc) for record in records)
    unread = [record for record in records if storages[record.size, record.crc] < noted[record.size, record.crc]]
    with (
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
        ThreadPoolExecutor(THREADS) as pool,
    ):

        def crc_of(record: Record) -> int:
            with view[record.begin : record.begin + record.size] as part:
                return crc32(part)

        for record, found in zip(unread, list(pool.map(crc_of, unread)), strict=True):
            if found != record.crc:
                crcs = f"CRC-32 {found:08x}, and noted is {record.crc:08x}"
                return f"is damaged: its record {record.name} is not what was written ({crcs})"
    return None


def whole_checkpoints(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """The undamaged checkpoints in a folder, `*.pt`: the one with the most updates first.

    Checkpoints with equal updates, and those that do not tell, are in the order of their dates, the newest first. Each
    is read from beginning to end once the iterator comes to it.
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
    except Exception:  # its type depends on the place of the damage
        return -1


def complain(path: str | os.PathLike[str], reason: str) -> str:
    """One line about a damaged checkpoint, with the reason from `why_damaged`; names an undamaged one beside it."""
    folder, real = Path(path).parent, os.path.realpath(path)
    others = [x for x in folder.glob("*.pt") if x.is_file() and os.path.realpath(x) != real]
    whole = next((x for x in whole_checkpoints(folder) if os.path.realpath(x) != real), None) if others else None
    if whole is not None:
        reason += f"; the newest whole one beside it is {whole.name}: --restore-file {whole}"
    elif others:
        reason += f"; of {len(others)} more in {folder} none is whole"
    return f"{path} {reason}"


def load_checked(file: BinaryIO, path: str | os.PathLike[str], mapped: bool = False) -> Any:
    """Loads an open checkpoint, compares it with its CRCs and its digest, and returns it without the digest.

    Args:
        file: the open file.
        path: the file's name, for messages.
        mapped: as for `load`.

    Raises:
        FileError: if the file is damaged or refused; one line that names it and the whole checkpoint beside it.
    """
    try:
        state = load(file, mapped)
    except CheckpointError as error:
        damage = damage_of(file) if is_archive(file) else None
        raise FileError(complain(path, damage or str(error))) from None
    check_loaded(file, path, state)
    return state


def check_loaded(file: BinaryIO, path: str | os.PathLike[str], state: Any) -> None:
    """Compares a checkpoint that was just loaded with its CRCs and its digest, and takes the digest out of it.

    Args:
        file: the open file.
        path: the file's name, for messages.
        state: the loaded content.

    Raises:
        FileError: if it is damaged; one line that names it and the whole checkpoint beside it.
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
    """Names one of a model's weights that holds NaN; None if none does."""
    for name, weight in weights.items():
        # fairseq's `_float_tensor` tells a device and a type; nothing is ever written to it, so it may hold anything.
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or name.endswith("_float_tensor"):
            continue
        # A sum takes a fraction of the time, and is NaN or infinite where a number is.
        if not weight.sum(dtype=torch.float32).isfinite() and weight.isnan().any():
            return f"its weight {name} holds NaN (not a number), as those of a training that diverged"
    return None


def describe(path: str | os.PathLike[str]) -> tuple[bool, str]:
    """True if a checkpoint is undamaged, and a line about it, with the digest of its weights."""
    if damage := why_damaged(path):
        return False, complain(path, damage)
    try:
        with open(path, "rb") as file:
            state = load(file, mapped=True)
    except CheckpointError as error:
        return False, complain(path, str(error))
    if not isinstance(state, dict) or "model" not in state:
        return True, f"{path} is whole; it holds {type(state).__name__}, no model"
    noted = {None: "none is noted", False: "as noted", True: "another one is noted"}[is_changed(state)]
    return True, f"{path} is whole; digest of its model ({noted}): {model_digest(state['model'])}"


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
