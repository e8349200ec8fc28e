"""Writes files beside those that they replace."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_PREFIX = ".unfinished-"


@contextmanager
def put_in_place(folder: str) -> Iterator[str]:
    """A folder to write files into, which then take their places in `folder`, all after the last one is written.

    Who reads a file that is replaced keeps it. After an error the files are removed, and what was there before stays;
    what a process has left that was killed is removed by the next one.
    """
    with _locked(folder):  # so that no other process takes what is made here for what was left
        _remove_unfinished(folder)
        work = tempfile.mkdtemp(prefix=_PREFIX, dir=folder)
        in_use = os.open(work, os.O_RDONLY)
        _lock(in_use)
    try:
        yield work
        for name in sorted(os.listdir(work)):
            os.replace(os.path.join(work, name), os.path.join(folder, name))
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(in_use)


def _remove_unfinished(folder: str) -> None:
    for entry in list(os.scandir(folder)):
        if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
            descriptor = os.open(entry.path, os.O_RDONLY)
            if _lock(descriptor):
                shutil.rmtree(entry.path, ignore_errors=True)
            os.close(descriptor)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool = False) -> bool:
    """Says whether this process has locked it: not where another one has, nor on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
