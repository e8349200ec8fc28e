"""Writes files beside those that they replace, and none through a link or into a pipe."""

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import TextIO

from fairseq.text_files import FileError

_PREFIX = ".unfinished-"


@contextmanager
def put_in_place(folder: str) -> Iterator[str]:
    """A folder to write files into, which are moved to `folder` after the last one is written.

    A reader of a file that is replaced keeps the old one. After an error the new files are removed and the old ones
    stay. Files that a killed process left are removed by the next one.
    """
    with _locked(folder):  # so that no other process takes the new folder for one that was left
        _remove_unfinished(folder)
        work = tempfile.mkdtemp(prefix=_PREFIX, dir=folder)
        in_use = os.open(work, os.O_RDONLY)
        _lock(in_use)
    try:
        yield work
        # Each rename is atomic; a reader of the old file keeps it.
        for name in sorted(os.listdir(work)):
            os.replace(os.path.join(work, name), os.path.join(folder, name))
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(in_use)


class LogFile(logging.FileHandler):
    """A log, which is appended to. Raises `FileError` if it is a link, a pipe or a device."""

    def _open(self) -> TextIOWrapper:
        # O_NONBLOCK, not to wait for a pipe's reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self.baseFilename, flags | os.O_CLOEXEC, 0o666)
            found = os.fstat(descriptor)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            found = None
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            if found:
                os.close(descriptor)
            raise FileError(f"{self.baseFilename} is a link, a pipe or a device; a log must be a file of its own")
        return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def check_hydras_files(arguments: list[str]) -> None:
    """Raises `FileError` if a file that hydra writes for a command's arguments is a link, a pipe or a device."""
    folders = [value for name, _, value in (each.partition("=") for each in arguments) if name == "hydra.run.dir"]
    for name in ("hydra_train.log", ".hydra", *(f".hydra/{part}.yaml" for part in ("config", "hydra", "overrides"))):
        path = os.path.join(*folders[-1:], name)
        with suppress(FileNotFoundError):
            kind = os.lstat(path).st_mode
            if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                raise FileError(f"{path} is a link, a pipe or a device; hydra writes to it: it must be a regular file")


def open_new(path: str) -> TextIO:
    """Opens a new text file to be written line by line; removes an old one of that name."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "x", buffering=1, encoding="utf-8")


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
    """True if this process has locked it; False if another one has, or if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
