"""Parts that chunk-parallel forms share: chunks of a sequence, products of decays within one, rows of documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_fastweights.ops import reference
from fairseq_fastweights.ops.checks import state_dtype
from fairseq_fastweights.ops.kernels import differentiable_once

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
    # (batch, heads, time, dim) -> a multiple of the chunk length
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
    """lower @ x for a matrix that is 0 above its diagonal; a NaN or infinity in a row of x reaches no earlier row.

    0 times NaN is NaN: values that are not finite are taken out of the product, and added again to the later rows.
    """
    if answers(x) and bool(x.sum().isfinite()):
        return lower @ x
    finite = torch.nan_to_num(x, 0.0, 0.0, 0.0)
    # Every row sees the rows before it, whatever their weight.
    unseen = (x - finite).cumsum(-2)
    return torch.baddbmm(unseen.flatten(0, -3), lower.flatten(0, -3), finite.flatten(0, -3)).view_as(x)


def answers(x: Tensor) -> bool:
    """True if the values of `x` can be asked for: on a GPU the CPU would have to wait for them."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


# Products of decays within a chunk, of which none exceeds 1 and none is divided or subtracted (`diagonal`).


def halves(length: int) -> list[int]:
    """1, 2, 4, ... up to half of `length`, a power of two."""
    return [1 << i for i in range(length.bit_length() - 1)]


def split(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Views of the first and second halves of the blocks of 2 * half steps: (..., blocks, half, dim) each."""
    *others, length, dim = x.shape
    blocks = x.view(*others, length // (2 * half), 2, half, dim)
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def decays_around_middle(
    log_decay: Tensor | None, half: int
) -> tuple[tuple[None, Tensor | None], tuple[Tensor | None, None]]:
    """Factors from each block's middle to the steps after it, and from the steps before it to the middle."""
    if log_decay is None:
        return (None, None), (None, None)
    first, second = split(log_decay, half)
    return (None, second.cumsum(-2).exp()), (exclusive_suffix_sums(first).exp(), None)


def inclusive(log_decay: Tensor | None) -> Tensor | None:
    """Factors from a chunk's start to each of its steps."""
    return None if log_decay is None else log_decay.cumsum(-2).exp()


def exclusive_reverse(log_decay: Tensor | None) -> Tensor | None:
    """Factors from each step to its chunk's end."""
    return None if log_decay is None else exclusive_suffix_sums(log_decay).exp()


def suffix_sums(x: Tensor) -> Tensor:
    """Sums over each step and all later ones."""
    return x.flip(-2).cumsum(-2).flip(-2)


def exclusive_suffix_sums(x: Tensor) -> Tensor:
    """Sums over all later steps; shifted rather than subtracted, to keep the digits of small terms."""
    return torch.cat([suffix_sums(x[..., 1:, :]), torch.zeros_like(x[..., :1, :])], dim=-2)


def exclusive_prefix_sums(x: Tensor) -> Tensor:
    """Sums over all earlier steps."""
    return torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :].cumsum(-2)], dim=-2)


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """The product; no factor is 1."""
    return x if factor is None else x * factor


def scores(readers: Tensor, read: Tensor, log_decay: Tensor | None) -> Tensor:
    """<readers_t, read_s> with the decays of (s, t] between them for s <= t, 0 elsewhere: (..., length, length)."""
    if log_decay is None:
        return _LowerProducts.apply(readers, read)
    if log_decay.shape[-1] == 1:  # a number for each pair (s, t], of no more size than the products
        added = log_decay.expand(*log_decay.shape[:-1], log_decay.shape[-2]).tril(-1)  # [u, s]: by step u > s
        return _LowerProducts.apply(readers, read) * added.cumsum(-2).exp()
    *others, length, _ = readers.shape
    result = torch.diag_embed((readers * read).sum(-1))
    for half in halves(length):
        (_, a), (b, _) = split(readers, half), split(read, half)
        (_, after), (before, _) = decays_around_middle(log_decay, half)
        # Decays of (s, t] = those from s to the middle, times those from the middle to t.
        met = times(a, after) @ times(b, before).transpose(-1, -2)
        count = length // (2 * half)
        # Of each block the lower left quarter: a diagonal of such blocks.
        blocks = torch.zeros(*others, count, 2, half, count, 2, half, dtype=met.dtype, device=met.device)
        blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).copy_(met.movedim(-3, -1))
        result = result + blocks.view(*others, length, length)
    return result


class _LowerProducts(torch.autograd.Function):
    """<readers_t, read_s> for s <= t, with gradients of readers to which nothing that is read later comes."""

    @staticmethod
    def forward(ctx: Any, readers: Tensor, read: Tensor) -> Tensor:
        ctx.save_for_backward(readers, read)
        return (readers @ read.transpose(-1, -2)).tril_()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, Tensor], gradient: Tensor) -> tuple[Tensor, Tensor]:
        readers, read = saved
        gradient = gradient.tril()
        return times_lower(gradient, read), gradient.transpose(-1, -2) @ readers


# The rules step by step, for documents that hold NaN or infinities, which must not reach the others of their row.
# Chunks multiply contributions of other documents by 0, and 0 times NaN is NaN; steps set the state to 0.


def are_apart(starts: Tensor | None, tensors: Sequence[Tensor | None], logs: Sequence[Tensor | None] = ()) -> bool:
    """True if chunks keep documents apart: `tensors` are finite, and no number of `logs` is NaN, or there is one.

    Also true where the answer would have to be waited for (docs/limits.md).
    """
    if starts is None or not answers(starts):
        return True
    # A sum is finite only if all its terms are.
    finite = all(bool(x.sum(dtype=state_dtype(x.dtype)).isfinite()) for x in tensors if x is not None)
    return finite and not any(bool(x.sum().isnan()) for x in logs if x is not None)


def step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor | None,
    beta: Tensor | None,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    initial_state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes step by step, a chunk again backwards."""
    # Checkpoints: the backward pass holds the states of one chunk at a time.
    outputs, state = [], initial_state
    for t in range(0, v.shape[1], LONGEST_CHUNK):
        first, *chunk = (
            None if x is None else x[:, t : t + LONGEST_CHUNK]
            for x in (starts, q, k, v, erase, beta, log_key_decay, log_value_decay)
        )
        out, state = checkpoint(
            reference.fast_weight_rule, *chunk, initial_state=state, starts=first, use_reentrant=False
        )
        outputs.append(out)
    assert state is not None
    return torch.cat(outputs, 1), state


def gradients_of(
    run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None], d_outs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of the inputs of a function, as autograd finds them."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        given = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(run(*leaves), given, d_outs, allow_unused=True))
    return [None if x is None else next(found) for x in leaves]
