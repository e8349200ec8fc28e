"""Reads the files of data sets, notices changes of them meanwhile, and notes which ones a training reads.

fairseq maps files into memory. If such a file has been cut short since, reading it ends the process with SIGBUS, which
Python cannot catch; if it has been written over, other data is read in silence. `DataFile` copies bytes by pread(2),
and then compares the file's size and time, one of which a write before the copy has changed. A line takes 3 more
microseconds than from a memory map. A file that another one is renamed over, as by fairseq-preprocess, stays open.
"""

import logging
import os
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from fairseq.digests import crc32
from fairseq.text_files import FileError

logger = logging.getLogger(__name__)

_opened: "weakref.WeakSet[DataFile]" = weakref.WeakSet()
_notes: "list[dict[str, Content]]" = []


class Content(NamedTuple):
    """The size and the CRC-32 of a file, by which contents are compared."""

    size: int
    crc: int


class DataFile:
    """A file of a data set, open as long as this is there; it may be sent to other processes.

    Raises:
        FileError: when it has changed, here or where it was sent to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._open()
        self._content = content_of(path)

    def _open(self) -> None:
        if not stat.S_ISREG(os.stat(self.path).st_mode):  # a pipe would be waited for
            raise FileError(f"{self.path} is no regular file; data must be one")
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._state = _state(os.fstat(self._descriptor))
        _opened.add(self)

    def read_into(self, array: np.ndarray[Any, Any], place: int) -> None:
        """Fills an array with the bytes from `place` on."""
        # A view: preadv writes into the array, in parts if a signal interrupts it.
        rest: Any = array.reshape(-1).view(np.uint8)
        try:
            while len(rest) and (count := os.preadv(self._descriptor, [rest], int(place))):
                rest, place = rest[count:], place + count
        except OSError as error:
            raise FileError(f"{self.path} cannot be read ({error.strerror})") from None
        self.check()
        if len(rest):
            raise FileError(f"{self.path} ends where its index says that there is more: it is of other data")

    def read(self, dtype: Any, count: int, place: int) -> np.ndarray[Any, Any]:
        """`count` numbers, from `place` on, in bytes."""
        array = np.empty(count, dtype)
        self.read_into(array, place)
        return array

    def check(self) -> None:
        """Raises a `FileError` if the file has changed since it was opened."""
        if complaint := self.why_changed():
            raise FileError(complaint)

    def why_changed(self) -> str | None:
        """The error of a changed file; None for one that was only touched."""
        try:
            state = _state(os.fstat(self._descriptor))
        except OSError:
            if self._descriptor < 0:  # closed, while another thread looks at all that are open
                return None
            raise
        if state == self._state:
            return None
        # Size or time differ, as after `touch`: compare the contents, once.
        if (found := _content(self._descriptor)) == self._content:
            self._state = state
            return None
        return (
            f"{self.path} has changed while it was read: {_difference(self._content, found)}; data must stay as it is"
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return self.path, self._state, self._content

    def __setstate__(self, known: tuple[Any, ...]) -> None:
        self.path, state, self._content = known
        self._open()
        # The sender's state: a change before this process opened the file is noticed, too.
        self._state, found = state, self._state
        if found != state:
            self.check()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            _opened.discard(self)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class TrainingFiles:
    """The files of a training's data, whose contents are compared when they are loaded again.

    Attributes:
        now: those of this epoch, in the order in which they were loaded.
    """

    def __init__(self) -> None:
        self.now: dict[str, Content] = {}
        self._all: dict[str, Content] = {}

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Notes the files that are loaded meanwhile. Raises `FileError` if one has changed since an earlier epoch."""
        with noted() as self.now:
            yield
        for path, found in self.now.items():
            if (former := self._all.setdefault(path, found)) != found:
                raise FileError(
                    f"{path} has changed since this training read it: {_difference(former, found)}; the same command "
                    "goes on with what is there now, from the beginning of this epoch"
                )


def kept(files: dict[str, Content]) -> list[list[Any]]:
    """The part of them that a checkpoint keeps."""
    return [[path, *content] for path, content in files.items()]


def compare(files: dict[str, Content], former: list[list[Any]], in_epoch: bool, goes_on: bool) -> None:
    """Compares an epoch's data with the contents that a checkpoint kept; data may have been moved.

    Args:
        files: the files that are there.
        former: those that were `kept`.
        in_epoch: whether the checkpoint is from within an epoch, of which the rest is to be read.
        goes_on: whether it is the run's own last one, and none that --restore-file names.

    Raises:
        FileError: if a run would read the rest of other data. In other cases there is a warning.
    """
    refused = in_epoch and goes_on
    if refused and former and len(files) != len(former):
        raise FileError(
            f"{', '.join(files)}: the checkpoint stopped within an epoch of {len(former)} files; there must be as "
            "many, or --reset-dataloader be given, which begins an epoch"
        )
    # By their order, as the paths may be others.
    for (path, found), (known, *content) in zip(files.items(), former, strict=False):
        if found == Content(*content):
            continue
        difference = _difference(Content(*content), found)
        other = f"{path} is not what the checkpoint stopped in the middle of: {difference}; "
        if refused:
            raise FileError(f"{other}it must be that data, or --reset-dataloader be given, which begins an epoch")
        if in_epoch:
            logger.warning(f"{other}as much of it is left out as was read, unless --reset-dataloader is given")
        elif path == known:
            logger.warning(f"{path} has changed since the checkpoint: {difference}")


def first_change() -> str | None:
    """The error for one of the open files that has changed, once for each; None if there is none."""
    for file in list(_opened):
        if complaint := file.why_changed():
            _opened.discard(file)
            return complaint
    return None


@contextmanager
def noted() -> Iterator[dict[str, Content]]:
    """The files of all splits that are loaded meanwhile, and their contents."""
    found: dict[str, Content] = {}
    _notes.append(found)
    try:
        yield found
    finally:
        _notes.remove(found)


def note(paths: Iterable[str]) -> None:
    """Notes that files are loaded, where somebody asks."""
    for path in paths if _notes else ():
        for notes in _notes:
            notes[path] = content_of(path)


def content_of(path: str) -> Content:
    """The content of a file; read once as long as it does not change."""
    return _content_of(path, state_of(path))


def state_of(path: str) -> tuple[int, ...]:
    """A value that changes when a file does."""
    return _state(os.stat(path))


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _content_of(path: str, state: tuple[int, ...]) -> Content:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _content(descriptor)
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> Content:
    size = crc = 0
    while part := os.pread(descriptor, 2**22, size):
        size, crc = size + len(part), crc32(part, crc)
    return Content(size, crc)


def _difference(former: Content, found: Content) -> str:
    if former.size == found.size:
        return f"its {found.size:,} bytes are others"
    return f"it had {former.size:,} bytes and has {found.size:,}"
