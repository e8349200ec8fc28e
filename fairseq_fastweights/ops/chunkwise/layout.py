"""Turns (batch, time, heads, dim) into chunks and back, and carries states from chunk to chunk."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.ops.checks import state_dtype

# Longer chunks mean fewer sequential steps and fewer saved states, but time * chunk_length * dim work within chunks.
LONGEST_CHUNK = 64


def chunk_length(time: int) -> int:
    """The chunk length for a sequence of `time` steps: a power of two, no longer than the sequence needs."""
    return min(LONGEST_CHUNK, 1 << max(0, time - 1).bit_length())


def to_chunks(x: Tensor, length: int) -> Tensor:
    """(batch, time, heads, dim) -> (batch, heads, chunks, length, dim), in the dtype of states.

    The last chunk is filled up with zeros: a key of 0 writes nothing, a log decay of 0 leaves the state as it is.
    """
    batch, time, heads, dim = x.shape
    x = x.to(state_dtype(x.dtype)).transpose(1, 2)
    x = F.pad(x, (0, 0, 0, -time % length))
    return x.reshape(batch, heads, x.shape[2] // length, length, dim)


def from_chunks(x: Tensor, time: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_chunks`: (batch, heads, chunks, length, dim) -> (batch, time, heads, dim)."""
    batch, heads, chunks, length, dim = x.shape
    x = x.reshape(batch, heads, chunks * length, dim)[:, :, :time]
    return x.transpose(1, 2).to(dtype).contiguous()


def first_state(initial_state: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """The state before the first chunk, for k and v in chunks."""
    if initial_state is not None:
        return initial_state
    return k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])


def times_lower(lower: Tensor, x: Tensor) -> Tensor:
    """lower @ x for a matrix that is 0 above its diagonal: whatever a row of x holds, no row before it is touched.

    0 times what is not finite is no 0: it is taken out of the product, and put back where it may be seen.
    """
    if answers(x) and bool(x.sum().isfinite()):
        return lower @ x
    finite = torch.nan_to_num(x, 0.0, 0.0, 0.0)
    unseen = (x - finite).cumsum(-2)
    return torch.baddbmm(unseen.flatten(0, -3), lower.flatten(0, -3), finite.flatten(0, -3)).view_as(x)


def answers(x: Tensor) -> bool:
    """True if the values of `x` can be asked for: on a GPU the CPU would have to wait for them."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
