"""The last few positions that each position sees: in blocks for whole texts, and as what a state keeps of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SMALLEST_BLOCK = 32
"""The smallest block of queries, unless a quarter of the window is larger: smaller blocks cost more in calls."""


class Blocks(NamedTuple):
    """Blocks of queries, each with the keys and values that it sees some of, in rows (batch * blocks, heads, ...).

    Attributes:
        q: (rows, heads of queries, size, dim).
        k, v: (rows, heads of keys, positions, dim), those of the block and those before it.
        visible: (rows, size, positions), which of them each query sees.
        shape: batch, blocks and the number of positions of the text.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    shape: tuple[int, int, int]

    def join(self, out: Tensor) -> Tensor:
        """Puts what was computed of the queries, (rows, heads, size, dim), together: (batch, heads, time, dim)."""
        batch, blocks, time = self.shape
        if blocks == 1:
            return out
        return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :time]


def in_blocks(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, seen: Tensor) -> Blocks:
    """Cuts a text into blocks, so that time and memory grow linearly with it.

    Args:
        q, k, v: (batch, heads, time, dim) of the text; heads of keys and values may be fewer.
        past_k, past_v: (batch, heads, window - 1, dim), those before it, the last at the end.
        seen: (batch, time), how many positions before itself each sees, at most window - 1; or one row.
    """
    batch, _, time, _ = q.shape
    past = past_k.shape[2]
    size = min(time, max(SMALLEST_BLOCK, -(-past // 4)))
    blocks = -(-time // size)
    behind = -(-past // size)  # blocks that a block sees of, beside itself
    overlap = past if blocks == 1 else behind * size

    def cut(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, blocks * size - time)).unflatten(2, (blocks, size))

    def with_overlap(x: Tensor, before: Tensor) -> Tensor:
        if blocks == 1:
            return torch.cat([before, x], dim=2)[:, :, None]
        before = F.pad(before, (0, 0, overlap - past, 0)).unflatten(2, (behind, size))
        every = torch.cat([before, cut(x)], dim=2)
        return torch.cat([every[:, :, i : i + blocks] for i in range(behind + 1)], dim=3)

    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (cut(q), with_overlap(k, past_k), with_overlap(v, past_v)))
    age = torch.arange(size, device=q.device)[:, None] - torch.arange(-overlap, size, device=q.device)
    age = age.masked_fill(age < 0, past + 1)  # what comes after a position is as out of sight
    seen = F.pad(seen.expand(batch, time), (0, blocks * size - time))
    visible = age <= seen.reshape(batch, blocks, size, 1)
    return Blocks(q, k, v, visible.flatten(0, 1), (batch, blocks, time))


def last(past: Tensor, new: Tensor, real: Tensor | None) -> Tensor:
    """The last positions of `past` and `new` together, as many as `past` has: (batch, heads, positions, dim).

    `real` is the number of positions of `new` that count in each row, from its first; None for all.
    """
    kept, time = past.shape[2], new.shape[2]
    if real is None:
        # A copy also where it is a part of `new`: a state must not keep alive what it was taken from.
        return torch.cat([past[:, :, min(time, kept) :], new[:, :, max(time - kept, 0) :]], dim=2)
    places = real[:, None] + torch.arange(kept, device=past.device)
    return torch.cat([past, new], dim=2).gather(2, places[:, None, :, None].expand(past.shape))
