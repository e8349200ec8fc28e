"""Chooses the backend of a call. The first call of each kind says it, so that no run is slow without a word."""

from __future__ import annotations

import logging

import torch
from torch.autograd import forward_ad

from fairseq_fastweights.ops import libraries, native
from fairseq_fastweights.ops.checks import BackendUnavailable

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "chunkwise", "native")

_said: set[tuple[str, str, str | None]] = set()


def choose_backend(backend: str, time: int, why_not_native: str | None, in_chunks: bool) -> str:
    """The backend of a call of so many steps: `backend`, or what "auto" takes.

    Args:
        backend: one of `BACKENDS`.
        time: how many steps there are.
        why_not_native: why there is no kernel for the call; None if there is one.
        in_chunks: whether there is a form that is parallel in time.

    Raises:
        ValueError: for what is no backend.
        BackendUnavailable: if kernels are asked for and there are none.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend == "auto":
        if why_not_native is None:
            return "native"
        # A single step has nothing to chunk: the reference's loop over time is that step.
        return "chunkwise" if in_chunks and time > 1 else "reference"
    if backend == "native" and why_not_native is not None:
        other = "chunkwise" if in_chunks else "reference"
        raise BackendUnavailable(
            f"backend='native' was asked for: {why_not_native}; or use backend={other!r} (which 'auto' takes then)"
        )
    return backend


def choose_elementwise(backend: str, x: torch.Tensor) -> str:
    """The backend of an operation of single numbers, or of single vectors, of x: "reference" or "native".

    "auto" takes the reference where it has what kernels lack, forward-mode derivatives, and under torch.compile, which
    puts it into the kernels before and after it. For the errors see `choose_backend`.
    """
    if backend == "auto" and (forward_ad._current_level >= 0 or torch.compiler.is_compiling()):
        return "reference"
    return choose_backend(backend, 1, native.why_not(x.device.type, x.dtype), in_chunks=False)


@torch.compiler.assume_constant_result
def say_backend(kind: str, backend: str, why_not_native: str | None, in_chunks: bool) -> None:
    """Logs which backend runs, the first time since `say_again`: a warning, if kernels are missing that could be there.

    Args:
        kind: the type of the device.
        backend: what was asked for, as of `choose_backend`.
        why_not_native: as there.
        in_chunks: as there.
    """
    key = kind, backend, why_not_native
    if key in _said or kind == "meta":
        return
    _said.add(key)
    taken = choose_backend(backend, 2, why_not_native, in_chunks)  # of texts; a single step may go another way
    if taken == "native" and native.EXTENSIONS[kind] == "cpu":
        taken += f" ({native.cpu_instruction_set()})"
    where = "the CPU" if kind == "cpu" else f"{kind} ({torch.cuda.get_device_name()})" if kind == "cuda" else kind
    told, level = f"fast weight rules run by {taken} on {where}", logging.INFO
    if backend == "auto" and why_not_native is not None:
        told += f": {why_not_native}"
        if kind in libraries.PARTS and why_not_native == libraries.load(kind):
            level = logging.WARNING
    logger.log(level, told)


def say_again() -> None:
    """Lets the next calls say it once more: another training, evaluation or generation begins."""
    _said.clear()
