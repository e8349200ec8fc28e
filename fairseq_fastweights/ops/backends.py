"""Chooses the backend of a call: where there are kernels, and the choice of "auto".

The first call of each kind logs its backend, so that a run without kernels is not slow in silence.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights.ops import libraries
from fairseq_fastweights.ops.checks import BackendUnavailable

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "chunkwise", "native", "fla")
AUTOMATIC = ("auto", "fla")
"""Backends that choose for themselves what runs anything but sequences of rules, for which "fla" is `ops.fla`."""
DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    "cuda": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
}
"""By type of device, the dtypes that its kernels take."""
EXTENSIONS = {"cpu": "cpu", "cuda": "cuda"}
"""By type of device, the kernels that run its tensors: tests run those for GPUs, emulated, on tensors of the CPU."""
LARGEST_DIM = {"cuda": 512}
"""By type of device, the largest key and value dimension that one call of its kernels takes, where there is a largest.

Larger ones are divided (`kernels.Kernel`), but for the delta rule's keys.
"""

chosen: dict[tuple[Any, ...], Any] = {}
"""Choices that were made, by all that they depend on: a layer's calls make each once. `say_again` clears it."""

_said: set[tuple[str, str, str | None]] = set()


@torch.compiler.assume_constant_result
def why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """Why there are no kernels for tensors on such a device, with how to mend it; None if there are."""
    if device_type not in DTYPES:
        return f"there are no compiled kernels for devices of type {device_type}, only for {' and '.join(DTYPES)}"
    if dtype not in DTYPES[device_type]:
        return f"the {device_type} kernels do not take {dtype}"
    return libraries.load(device_type)


def fits(device_type: str, dim: int) -> bool:
    """True if one call of the kernels for such a device takes key and value dimensions of up to `dim`."""
    return dim <= LARGEST_DIM.get(device_type, dim)


def refuse_tangents(*inputs: Tensor | None) -> None:
    """Raises `NotImplementedError` if one of them carries a tangent, which the kernels would drop in silence."""
    # The level comes first: outside forward-mode differentiation, nearly always, no tensor is asked.
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    ):
        raise NotImplementedError(
            "initial_state or an input carries a tangent, and backend='native' (which 'auto' takes here) has no "
            "forward-mode derivatives; use backend='reference', which has them"
        )


def cpu_instruction_set() -> str:
    """The instruction set of the CPU kernels that run on this processor: "baseline", "avx2" or "avx512".

    The environment variable ``FASTWEIGHTS_CPU_ISA`` asks for one of those that it has.

    Raises:
        BackendUnavailable: if there are no CPU kernels.
    """
    if (reason := libraries.load("cpu")) is not None:
        raise BackendUnavailable(reason)
    return torch.ops.fairseq_fastweights.cpu_instruction_set()


def choose_backend(backend: str, time: int, why_not_native: str | None, in_chunks: bool) -> str:
    """The backend of a call: `backend`, or the choice of one of `AUTOMATIC`.

    Args:
        backend: one of `BACKENDS`.
        time: how many steps there are.
        why_not_native: why there is no kernel for the call; None if there is one.
        in_chunks: whether there is a form that is parallel in time.

    Raises:
        ValueError: for another name.
        BackendUnavailable: if kernels are asked for and there are none.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend in AUTOMATIC:
        if why_not_native is None:
            return "native"
        # A single step has nothing to chunk: the reference's loop over time is that step.
        return "chunkwise" if in_chunks and time > 1 else "reference"
    # A request for kernels is never served by another backend.
    if backend == "native" and why_not_native is not None:
        other = "chunkwise" if in_chunks else "reference"
        raise BackendUnavailable(
            f"backend='native' was asked for: {why_not_native}; or use backend={other!r} (which 'auto' takes then)"
        )
    return backend


@torch.compiler.assume_constant_result
def say_backend(kind: str, backend: str, why_not_native: str | None, in_chunks: bool) -> None:
    """Logs which backend runs, the first time since `say_again`: a warning, if kernels are missing that could be there.

    Args:
        kind: the type of the device.
        backend: the backend that was asked for, as in `choose_backend`.
        why_not_native: as in `choose_backend`.
        in_chunks: as in `choose_backend`.
    """
    # One line for each reason, not for each layer.
    key = kind, backend, why_not_native
    if key in _said or kind == "meta":
        return
    _said.add(key)
    taken = choose_backend(backend, 2, why_not_native, in_chunks)  # of texts; a single step may go another way
    if backend == "fla":
        taken = "flash-linear-attention"
    elif taken == "native" and EXTENSIONS[kind] == "cpu":
        taken += f" ({cpu_instruction_set()})"
    where = "the CPU" if kind == "cpu" else f"{kind} ({torch.cuda.get_device_name()})" if kind == "cuda" else kind
    told, level = f"fast weight rules run by {taken} on {where}", logging.INFO
    if backend == "auto" and why_not_native is not None:
        told += f": {why_not_native}"
        # Kernels that could be there deserve a warning; a rule without a kernel does not.
        if kind in libraries.PARTS and why_not_native == libraries.load(kind):
            level = logging.WARNING
    logger.log(level, told)


def say_again() -> None:
    """Lets the next calls log their backends again: another training, evaluation or generation begins."""
    _said.clear()
    chosen.clear()
