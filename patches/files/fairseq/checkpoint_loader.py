"""Loads checkpoint files without running code that they may contain.

Every read of a checkpoint goes through this module. `checkpoint_pickles` lists the classes that may be in one.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, BinaryIO

from fairseq import integrity
from fairseq.text_files import FileError


def open_checkpoint(file: str, path: str) -> BinaryIO:
    """Opens the checkpoint in `file`, known to the user as `path`.

    Raises `FileError`, naming `path`, when it is no regular file: to open a pipe might wait forever.
    """
    if reason := integrity.why_not_regular(file):
        raise FileError(f"checkpoint {path} {reason}")
    return open(file, "rb")


def names_the_file(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Lets a function that reads and upgrades a checkpoint, its first argument, fail in one line that names it."""

    @wraps(load)
    def named(path: str, *others: Any, **options: Any) -> dict[str, Any]:
        try:
            return load(path, *others, **options)
        except Exception as error:
            # It names a file already.
            if getattr(error, "filename", None) is not None or str(path) in str(error):
                raise
            reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
            raise FileError(
                f"checkpoint {path} is damaged, or not a checkpoint that fairseq wrote ({reason})"
            ) from error

    return named


def load_checkpoint_file(file: BinaryIO, path: str, part: str = "model") -> dict[str, Any]:
    """The content of the open checkpoint `file`, known to the user as `path`, tensors on the CPU.

    Raises `FileError`, naming `path`, when the file is empty, cut short or damaged, when it holds an object that no
    checkpoint of fairseq needs, and when it is no checkpoint of fairseq with this `part`.
    """
    state = integrity.load_checked(file, path)
    if not isinstance(state, dict) or not isinstance(state.get(part), dict):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise FileError(
            f"checkpoint {path} is not one of fairseq: it should be a dictionary with another under {part!r}, and is "
            f"{str(found)[:300]}"
        )
    return state
