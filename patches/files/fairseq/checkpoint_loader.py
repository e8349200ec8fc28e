"""Loads checkpoint files without running code that they may contain.

Every read of a checkpoint goes through this module.

A checkpoint is a pickle, and a pickle may name any function for the unpickler to call. PyTorch's safe loader
(`torch.load(..., weights_only=True)`) calls only what is on a list. Checkpoints of fairseq need a little more:

- `argparse.Namespace`, the options of the run: in every checkpoint before fairseq 0.10, in many since;
- the meters of a run, whole objects before fairseq 0.9, which nothing reads any more;
- NumPy numbers and arrays, which validation with `--eval-bleu` leaves among the metrics.

The last two are read by stand-ins for the classes that the pickle names: NumPy's own unpickling believes what the file
says about its data types, and with that about raw memory; the stand-ins accept plain numbers only.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, BinaryIO

import numpy as np
import torch
from fairseq import integrity
from fairseq.bounded_loading import TooLargeError, is_archive, load
from fairseq.text_files import FileError


class _OldMeter:
    """Takes the place of a meter of fairseq before 0.9, and holds what was in it."""


class _PickledDtype:
    """Takes the place of `numpy.dtype`: a type of numbers, never one that holds pointers."""

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        dtype = np.dtype(code)
        if dtype.kind not in "biufc":
            raise ValueError(f"a NumPy array of type {code!r}, where only numbers are allowed")
        self.dtype = dtype

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _PickledArray(np.ndarray[Any, Any]):
    """Takes the place of `numpy.ndarray`; it is one, and is saved as one again."""

    def __new__(cls) -> "_PickledArray":
        return super().__new__(cls, (0,))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, pickled_dtype, is_fortran, data = state
        if not isinstance(pickled_dtype, _PickledDtype) or not isinstance(data, bytes):
            raise ValueError("a NumPy array that does not consist of plain numbers")
        if math.prod(shape) * pickled_dtype.dtype.itemsize != len(data) or min(shape, default=0) < 0:
            raise ValueError(f"a NumPy array of shape {shape} with {len(data)} bytes")
        super().__setstate__((1, shape, pickled_dtype.dtype, is_fortran, data))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _new_array(subtype: type, shape: tuple[int, ...], typecode: bytes) -> _PickledArray:
    """Takes the place of `numpy.core.multiarray._reconstruct`: an array that is filled later."""
    return _PickledArray()


def _number(pickled_dtype: _PickledDtype, data: bytes) -> Any:
    """Takes the place of `numpy.core.multiarray.scalar`, and gives a Python number."""
    return np.frombuffer(data, pickled_dtype.dtype, count=1)[0].item()


def _bytes(text: str, encoding: str) -> bytes:
    """Takes the place of `_codecs.encode`, by which a pickle of protocol 2 holds bytes."""
    return text.encode("latin-1")


def _named(path: str, stand_in: Any) -> Any:
    """A subclass of a class, or a wrapper around a function, that the loader knows as `path`."""
    module, _, name = path.rpartition(".")
    if isinstance(stand_in, type):
        return type(name, (stand_in,), {"__module__": module})

    def named(*args: Any) -> Any:
        return stand_in(*args)

    named.__module__, named.__name__, named.__qualname__ = module, name, name
    return named


_ALLOWED: list[Any] = [
    argparse.Namespace,
    *(_named(f"fairseq.meters.{name}Meter", _OldMeter) for name in ("Average", "Stopwatch", "Time")),
    _named("_codecs.encode", _bytes),
    # NumPy 1 and 2 have two names for one module, and each writes its own into a checkpoint.
    *(_named(f"numpy.{core}.multiarray._reconstruct", _new_array) for core in ("core", "_core")),
    *(_named(f"numpy.{core}.multiarray.scalar", _number) for core in ("core", "_core")),
    _named("numpy.dtype", _PickledDtype),
    # The array itself is named, never called: `_reconstruct` gets it as an argument.
    _named("numpy.ndarray", object),
    _PickledArray,
]


@contextmanager
def _only_allowing(allowed: list[Any]) -> Iterator[None]:
    """`torch.serialization.safe_globals`, without what others allowed."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def open_checkpoint(file: str, path: str) -> BinaryIO:
    """Opens the checkpoint in `file`, known to the user as `path`.

    Raises `FileError`, naming `path`, when it is no regular file: to open a pipe might wait forever.
    """
    if reason := integrity.why_not_regular(file):
        raise FileError(f"checkpoint {path} {reason}")
    return open(file, "rb")


def names_the_file(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Lets a function that reads a checkpoint, its first argument, fail in one line that names it.

    It converts what old versions of fairseq wrote, and fails wherever something else is found.
    """

    @wraps(load)
    def named(path: str, *others: Any, **options: Any) -> dict[str, Any]:
        try:
            return load(path, *others, **options)
        except Exception as error:
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
    if not file.read(1):
        raise FileError(integrity.complain(path, "is empty (0 bytes)"))
    file.seek(0)
    try:
        with _only_allowing(_ALLOWED):
            state = load(file)
    except TooLargeError as error:
        raise FileError(integrity.complain(path, str(error))) from None
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        damage = integrity.damage_of(file) if is_archive(file) else None
        raise FileError(integrity.complain(path, damage or _complaint(error))) from None
    integrity.check_loaded(file, path, state)
    if not isinstance(state, dict) or not isinstance(state.get(part), dict):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise FileError(
            f"checkpoint {path} is not one of fairseq: it should be a dictionary with another under {part!r}, and is "
            f"{found}"
        )
    return state


def _complaint(error: Exception) -> str:
    """Says what is wrong with a file, without PyTorch's advice to switch the safe loader off."""
    reason = str(error) or type(error).__name__
    for phrase in ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL "):
        if phrase in reason:
            name = reason.split(phrase, 1)[1].split()[0]
            return f"is refused: it asks for {name}, which no checkpoint of fairseq needs"
    # Before this name stands how to switch the safe loader off, after it what the loader met.
    reason = reason.rpartition("WeightsUnpickler error: ")[2].strip().split(". ")[0].splitlines()[0]
    return f"cannot be loaded; it is cut short, damaged or no checkpoint ({reason})"
