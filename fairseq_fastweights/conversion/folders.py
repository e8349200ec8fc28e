"""A folder that appears whole or not at all."""

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
        ValueError: if something is there already, or the folder that it would be in is not.
    """
    if os.path.lexists(target):
        raise ValueError(f"{target}: TARGET exists; nothing is overwritten, it must be a new folder")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target}: TARGET's parent folder must exist")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Gives a folder to write to, beside `target`, and renames it to that at the end; after an error it is gone.

    Raises:
        OSError: naming `target`, if something cannot be written.
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
