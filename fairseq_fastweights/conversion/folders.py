"""Creates a folder completely or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_target(target: Path) -> None:
    """Checks, before any work, that a new folder can be made.

    Raises:
        ValueError: if `target` exists already, or its parent folder does not.
    """
    if os.path.lexists(target):
        raise ValueError(f"{target}: TARGET exists; nothing is overwritten, it must be a new folder")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target}: TARGET's parent folder must exist")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A context with a new folder beside `target`, which is renamed to `target` at the end, or removed after an error.

    Raises:
        OSError: if something cannot be written; the message names `target`.
    """
    target = target.absolute()
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        staging.chmod(0o777 & ~mask)  # mkdtemp's folders are their maker's alone
        yield staging
        check_target(target)  # os.rename would replace an empty folder that was made in the meantime
        staging.rename(target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(f"{target}: TARGET cannot be written: {error}") from error
        raise
