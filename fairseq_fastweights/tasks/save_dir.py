"""The folder of a run's checkpoints: one run at a time writes to it, and starts from an undamaged checkpoint."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
from pathlib import Path
from typing import IO

from fairseq_fastweights.files.integrity import whole_checkpoints, why_damaged, why_not_regular

logger = logging.getLogger(__name__)

LOCK = ".training.lock"

_UNFINISHED = ("checkpoint*.pt.tmp", "crash.pt.tmp")
_KEPT = r"checkpoint(\d+|_\d+_\d+|_best|\.best_.+)"
"""Names of checkpoints that a training writes beside the last one, which is no more than one of these."""

_held: dict[str, IO[str]] = {}
"""The locks of this process, by folder. The system releases them when the process ends."""


def claim(save_dir: str) -> None:
    """Makes the folder if it does not exist, and locks it until this process ends.

    Ends the process with one line if the folder cannot be written to, or if another run has locked it.
    """
    try:
        os.makedirs(save_dir, exist_ok=True)
        file = _open_lock(os.path.join(save_dir, LOCK))
    except OSError as error:
        raise SystemExit(_unwritable(save_dir, error)) from None
    # The same process may train twice in a folder: closing any file of a lock releases it, so the old one goes first.
    key = os.path.realpath(save_dir)
    if key in _held:
        _held[key].close()
    _held[key] = file
    try:
        # Not flock, which a killed process's data workers, forked from it, would hold for seconds.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise SystemExit(
            f"save_dir is {save_dir}, where another training runs ({file.read().strip()}); it must be another folder, "
            "or that training must end"
        ) from None
    try:
        if os.fstat(file.fileno()).st_nlink == 1:  # otherwise it is another file, too
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        for pattern in _UNFINISHED:
            for unfinished in Path(save_dir).glob(pattern):  # by a training that was killed
                unfinished.unlink()
    except OSError as error:
        raise SystemExit(_unwritable(save_dir, error)) from None


def _open_lock(path: str) -> IO[str]:
    """Opens the lock file while other processes may read it; refuses a link, which could name a file elsewhere."""
    if os.path.islink(path):
        raise SystemExit(f"{path} is a link; it must be a regular file")
    if os.path.exists(path) and (complaint := why_not_regular(path)):
        raise SystemExit(f"{path} {complaint}")
    return open(path, "a+", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666))


def replace_damaged(save_dir: str, suffix: str) -> None:
    """Replaces a damaged last checkpoint by a copy of the undamaged one with the most updates; keeps the damaged file.

    Ends the process with one line if all are damaged.
    """
    last = Path(save_dir, f"checkpoint_last{suffix}.pt")
    complaint = why_damaged(last) if last.is_file() else None
    if complaint is None:
        return
    names = re.compile(_KEPT + re.escape(f"{suffix}.pt"))
    whole = next((path for path in whole_checkpoints(save_dir) if names.fullmatch(path.name)), None)
    if whole is None:
        raise SystemExit(
            f"{last} {complaint}, and there is no undamaged checkpoint beside it; remove it to start from the beginning"
        )
    # The damaged file gets a second name, a hard link, before the complete copy takes its first one.
    copy, kept = last.with_suffix(".pt.tmp"), last.with_suffix(".pt.damaged")
    for path in (copy, kept):
        path.unlink(missing_ok=True)
    with whole.open("rb") as source, copy.open("xb") as target:
        shutil.copyfileobj(source, target, 2**20)
    os.link(last, kept, follow_symlinks=False)
    os.replace(copy, last)
    logger.warning("%s %s; training continues from %s; %s is the damaged file", last, complaint, whole.name, kept.name)


def _unwritable(save_dir: str, error: OSError) -> str:
    return f"save_dir is {save_dir}, which cannot be written to ({error.strerror}); it must be a folder that can be"
