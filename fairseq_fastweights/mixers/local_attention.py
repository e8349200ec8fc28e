"""Causal softmax attention to the last few positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.mixers.mixer import State, option, project, within_documents
from fairseq_fastweights.mixers.softmax_attention import SoftmaxMixer

SMALLEST_BLOCK = 32
"""The smallest block of queries, unless a quarter of the window is larger: smaller blocks cost more in calls."""


class LocalAttention(SoftmaxMixer):
    """Softmax attention in which each position sees itself and the window - 1 positions before it.

        out = W_out softmax(q k^T / sqrt(head_dim)) v, over the last `window` keys and values

    Time and memory grow linearly with the text, and the state does not grow. The parameters have fairseq's names, and
    for texts of at most `window` positions the results are those of a Transformer's attention. Mao 2022 compares with
    this mixer (Table 2, window 32). Padding takes no place in the window.

    The state holds "keys" and "values", (batch, heads, window - 1, head_dim), the last at the end, and "read",
    (batch,), the number of positions of the document so far.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        window: the number of positions that each position sees, itself included.
        dropout: of the attention weights.
        bias: whether the projections have biases.
        batch_first: as in `Mixer`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = LocalAttention(16, 2, window=4)(torch.randn(7, 3, 16))  # (time, batch, embed_dim)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'keys': (3, 2, 3, 8), 'values': (3, 2, 3, 8), 'read': (3,)}
    """

    window: int = option(32, "number of positions that local attention sees, the current one included", least=1)

    needs_positions = True
    takes_attention = True
    takes_starts = True
    padding_last = True

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **self.take_options(options))
        self.reset_parameters()

    def mix(
        self, x: Tensor, state: State | None, lengths: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        time, batch, _ = x.shape
        # (batch, heads, time, head_dim)
        q, k, v = map(self._heads, project(x, [self.q_proj, self.k_proj, self.v_proj]))
        before = state
        if before is None:
            # Zeros stand for positions before the text, of which `read` = 0 lets none be seen.
            nothing = k.new_zeros(batch, self.num_heads, self.window - 1, self.head_dim)
            before = {"keys": nothing, "values": nothing, "read": torch.zeros(batch, dtype=torch.long, device=x.device)}
        positions = torch.arange(time, device=x.device)[None]
        seen, read = within_documents(starts, positions, time if lengths is None else lengths, before["read"])
        dropout = self._dropout()
        # A text within the window: each position sees all before it, as in torch's causal attention.
        if state is None and starts is None and time <= self.window:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:  # each block of queries attends to its keys and to those of the blocks just before
            blocks = in_blocks(q, k, v, before["keys"], before["values"], seen.clamp(max=self.window - 1))
            mask = blocks.visible[:, None]
            out = F.scaled_dot_product_attention(blocks.q, blocks.k, blocks.v, attn_mask=mask, dropout_p=dropout)
            out = blocks.join(out)
        keys, values = last(before["keys"], k, lengths), last(before["values"], v, lengths)
        return self.out_proj(self._join_heads(out)), {"keys": keys, "values": values, "read": read}

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, window={self.window}"


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
        """Puts outputs for the blocks, (rows, heads, size, dim), together: (batch, heads, time, dim)."""
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
    # With blocks of a quarter of the window a query has scores for a quarter more keys than it sees.
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
    # How many positions each key lies before each query of its block: (size, overlap + size).
    age = torch.arange(size, device=q.device)[:, None] - torch.arange(-overlap, size, device=q.device)
    age = age.masked_fill(age < 0, past + 1)  # later positions are as out of sight as those before the window
    seen = F.pad(seen.expand(batch, time), (0, blocks * size - time))
    visible = age <= seen.reshape(batch, blocks, size, 1)
    return Blocks(q, k, v, visible.flatten(0, 1), (batch, blocks, time))


def last(past: Tensor, new: Tensor, real: Tensor | None) -> Tensor:
    """The last positions of `past` and `new` together, as many as `past` has: (batch, heads, positions, dim).

    `real` is the number of positions of `new` that count in each row, from its first; None for all.
    """
    kept, time = past.shape[2], new.shape[2]
    if real is None:
        # A copy also where it is a part of `new`: a state must not keep the text's tensor alive.
        return torch.cat([past[:, :, min(time, kept) :], new[:, :, max(time - kept, 0) :]], dim=2)
    places = real[:, None] + torch.arange(kept, device=past.device)
    return torch.cat([past, new], dim=2).gather(2, places[:, None, :, None].expand(past.shape))
