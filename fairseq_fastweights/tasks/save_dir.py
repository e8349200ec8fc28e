"""The folder of a run's checkpoints: one run at a time writes to it, and starts from an undamaged checkpoint."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
from pathlib import Path
from typing import IO

from fairseq_fastweights.integrity import whole_checkpoints, why_damaged

logger = logging.getLogger(__name__)

LOCK = ".training.lock"

_held: dict[str, IO[str]] = {}
"""The locks of this process, by folder. The system releases them when the process ends."""


def claim(save_dir: str) -> None:
    """Makes the folder if it does not exist, and locks it until this process ends.

    Ends the process with one line if the folder cannot be written to, or if another run has locked it.
    """
    try:
        os.makedirs(save_dir, exist_ok=True)
        # Beside what another process is reading.
        file = open(os.path.join(save_dir, LOCK), "a+")  # noqa: SIM115 (it stays open: that is the lock)
    except OSError as error:
        raise SystemExit(_unwritable(save_dir, error)) from None
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
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        for unfinished in Path(save_dir).glob("checkpoint*.pt.tmp"):  # by a training that was killed
            unfinished.unlink()
    except OSError as error:
        raise SystemExit(_unwritable(save_dir, error)) from None


def replace_damaged(save_dir: str, suffix: str) -> None:
    """Replaces a damaged last checkpoint by a copy of the newest undamaged one; the damaged file is kept beside it.

    Ends the process with one line if all are damaged.
    """
    last = Path(save_dir, f"checkpoint_last{suffix}.pt")
    complaint = why_damaged(last) if last.is_file() else None
    if complaint is None:
        return
    pattern = f"checkpoint*{suffix}.pt"
    whole = next((path for path in whole_checkpoints(save_dir) if path.match(pattern)), None)
    if whole is None:
        raise SystemExit(
            f"{last} {complaint}, and there is no undamaged checkpoint beside it; remove it to start from the beginning"
        )
    copy, kept = last.with_suffix(".pt.tmp"), last.with_suffix(".pt.damaged")
    shutil.copyfile(whole, copy)
    kept.unlink(missing_ok=True)
    os.link(last, kept)
    os.replace(copy, last)
    logger.warning("%s %s; training continues from %s; %s is the damaged file", last, complaint, whole.name, kept.name)


def _unwritable(save_dir: str, error: OSError) -> str:
    return f"save_dir is {save_dir}, which cannot be written to ({error.strerror}); it must be a folder that can be"
