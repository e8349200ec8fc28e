"""Writes checkpoints, each of which is whole or not there.

A file is written beside the one that it replaces, from its beginning at each try, and is renamed when it is whole. A
link in its place is removed, and nothing is written through it.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, BinaryIO, TypeVar

import torch
from fairseq.digests import with_digests

_Result = TypeVar("_Result")
_thread = ThreadPoolExecutor(1)  # starts with its first call
_unfinished: list[Future[None]] = []


def save(state: Any, path: str, in_background: bool = False) -> None:
    """Saves a checkpoint, with digests if it is a dictionary with "model".

    The third failure is raised, and there is no new file then. With `in_background`, if iopath is installed, a thread
    writes a copy of the present state; the next call, or `finish`, raises the thread's error.
    """
    # Digests of the present state, which training changes while a thread writes.
    state = with_digests(state)
    if _has_thread(in_background):
        content = _in_three_tries(lambda: _serialized(state))
        _later(lambda: write_whole(path, lambda file: file.write(content)))
    else:
        write_whole(path, lambda file: torch.save(state, file))


def copy(source: str, path: str, in_background: bool = False) -> None:
    """Copies a checkpoint that `save` was given, in the same way."""

    def write(file: BinaryIO) -> None:
        with open(source, "rb") as original:
            shutil.copyfileobj(original, file, 2**20)

    if _has_thread(in_background):
        _later(lambda: write_whole(path, write))
    else:
        write_whole(path, write)


def write_whole(path: str, write: Callable[[BinaryIO], Any]) -> None:
    """Lets `write` write a file; if that fails, twice more from the beginning."""
    _in_three_tries(lambda: _write_once(path, write))


def _write_once(path: str, write: Callable[[BinaryIO], Any]) -> None:
    beside = f"{path}.tmp"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        # "x": fails, and writes nothing, where somebody has put a link meanwhile.
        with open(beside, "xb") as file:
            write(file)
        os.replace(beside, path)
    except Exception:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _in_three_tries(act: Callable[[], _Result], left: int = 2) -> _Result:
    try:
        return act()
    except Exception:
        if not left:
            raise
        return _in_three_tries(act, left - 1)


def finish() -> None:
    """Waits for writes in the background; raises their errors."""
    while _unfinished:
        _unfinished.pop(0).result()


def _serialized(state: Any) -> memoryview:
    content = io.BytesIO()
    torch.save(state, content)
    return content.getbuffer()


def _has_thread(in_background: bool) -> bool:
    return in_background and find_spec("iopath") is not None  # which fairseq asks for, where it is an option


def _later(act: Callable[[], None]) -> None:
    while _unfinished and _unfinished[0].done():
        _unfinished.pop(0).result()
    _unfinished.append(_thread.submit(act))
