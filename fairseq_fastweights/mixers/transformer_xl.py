"""Softmax attention to a segment and to a memory of earlier inputs (Dai et al. 2019)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.mixer import State, option, within_documents
from fairseq_fastweights.mixers.rotary_embedding import turns
from fairseq_fastweights.mixers.softmax_attention import SoftmaxMixer

WAVELENGTH_BASE = 10000.0
"""The base of the sinusoids of distances, as in Vaswani et al. 2017: the slowest has a period of 2 pi x base."""

BIAS_STD = 0.02
"""The standard deviation of the initial u and v, as in the authors' code."""


class TransformerXL(SoftmaxMixer):
    """A Transformer-XL's relative attention, with recurrence over segments (Dai et al. 2019, Sec. 3.2 and 3.3).

        h = [SG(memory), x]                             memory: the last inputs of the segments before; no gradient
        q, k, v = W_q x, W_k h, W_v h
        score_ij = (q_i + u) k_j + (q_i + v) W_R R_{i-j}    divided by sqrt(head_dim), for all j <= i
        out = W_out softmax(score) v

    R_d, (embed_dim,), holds the sines and then the cosines of the distance d. u (`content_bias`) and v
    (`position_bias`), (heads, head_dim), are each layer's own, as with the authors' option `untie_r`. Time grows with
    segment x (memory + segment); the state does not grow.

    A call reads a segment. Position i of it, from 0, sees itself, the i positions before it and the memory. So, unlike
    in all other mixers, the output depends on how a text is divided into segments, except for texts of at most `memory`
    positions. Step by step, each position sees the `memory` positions before it; with `same_length` this holds in every
    segment, and the division changes only the gradients, which end at the edges. (In the authors' code `same_length`
    counts the position itself among the `memory` that it sees.)

    Padding takes no position.

    No parameter depends on the options, so that evaluation may use others than training. Schlag et al. 2021 (Table 4,
    App. F) count all keys and values of a segment as a layer's state, (memory + segment) x 2 embed_dim numbers (their
    text has a product in place of the sum, from which their numbers do not follow). Kept between segments are memory x
    embed_dim numbers, from which keys and values are computed again: the state is "memory", (batch, memory, embed_dim),
    the layer's last inputs with the last at the end, and "filled", (batch,), how many of them belong to the document.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        dropout: of the attention weights.
        bias: whether the projections have biases; the paper's have none.
        memory: number of positions before a segment that it sees; in the paper's training, the length of a segment.
        clamp_len: the largest distance, to which larger ones are clamped, for memories longer than in training; 0 for
            no largest distance.
        same_length: whether every position sees exactly the `memory` positions before it.
        batch_first: as in `Mixer`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> layer, text = TransformerXL(16, 2, memory=4), torch.randn(9, 3, 16)
        >>> first, state = layer(text[:5])  # (time, batch, embed_dim)
        >>> rest, state = layer(text[5:], state)  # sees text[1:5] and itself
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'memory': (3, 4, 16), 'filled': (3,)}
    """

    memory: int = option(64, "number of positions before a segment that Transformer-XL sees", least=0)
    clamp_len: int = option(0, "largest distance that Transformer-XL tells from longer ones; 0 is no limit", least=0)
    same_length: bool = option(False, "let all positions of Transformer-XL see equally many before them")

    unrecorded = ("memory", "clamp_len", "same_length")  # as evaluation may use others than training
    takes_starts = True
    padding_last = True

    def __init__(self, embed_dim: int, num_heads: int, *, bias: bool = False, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, bias=bias, **self.take_options(options))
        self.position_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.content_bias = nn.Parameter(torch.empty(num_heads, self.head_dim))
        self.position_bias = nn.Parameter(torch.empty(num_heads, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, in its order, and then the other parameters."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.position_proj.weight)
        self.reset_special_parameters()

    def reset_special_parameters(self) -> None:
        """Draws u and v from N(0, `BIAS_STD`)."""
        nn.init.normal_(self.content_bias, std=BIAS_STD)
        nn.init.normal_(self.position_bias, std=BIAS_STD)

    def mix(
        self, x: Tensor, state: State | None, lengths: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        time, batch, _ = x.shape
        read = torch.full((batch,), time, device=x.device) if lengths is None else lengths
        positions = torch.arange(time, device=x.device)[None]
        # Positions of a document before each, at most `memory` of which are from earlier calls.
        seen, filled = within_documents(starts, positions, read, 0 if state is None else state["filled"])
        # h = [SG(memory), x]
        inputs = x if state is None else torch.cat([state["memory"].transpose(0, 1), x])

        q = self.q_proj(x).view(time, batch, self.num_heads, self.head_dim)
        k, v = (self._heads(projection(inputs)) for projection in (self.k_proj, self.v_proj))
        # softmax((q_i + u) k_j + (q_i + v) W_R R_{i-j}), of which the second term is given as a mask
        scores = self._position_scores(q + self.position_bias, len(inputs))
        out = F.scaled_dot_product_attention(
            (q + self.content_bias).permute(1, 2, 0, 3),
            k,
            v,
            attn_mask=scores.masked_fill(~self._visible(seen, len(inputs)), -math.inf),
            dropout_p=self._dropout(),
        )
        places = read[:, None] + torch.arange(len(inputs) - time - self.memory, len(inputs) - time, device=x.device)
        # A copy: a state must not keep alive the inputs of a whole text. Places before the first are not filled.
        last = places.clamp(min=0)[:, :, None].expand(batch, self.memory, self.embed_dim)
        past = inputs.detach() if len(inputs) else x.new_zeros(1, batch, self.embed_dim)
        memory = past.transpose(0, 1).gather(1, last)
        return self.out_proj(self._join_heads(out)), {"memory": memory, "filled": filled.clamp(max=self.memory)}

    def _position_scores(self, q: Tensor, keys: int) -> Tensor:
        """The part of the scores that depends on distances.

        Args:
            q: (time, batch, heads, head_dim), the queries of the last positions.
            keys: number of positions.

        Returns:
            (batch, heads, time, keys), undefined for keys after the query.
        """
        time = q.shape[0]
        # One distance more than there are: rows of keys + 1 scores, each read from one place later than the row before,
        # are rows of keys that follow one another. So distances i - j are a view of distances by place (App. B).
        precise = ops.state_dtype(q.dtype)  # bfloat16 cannot tell distance 300 from 301
        distances = torch.arange(keys - 1, -2, -1, device=q.device, dtype=precise)
        if self.clamp_len:
            distances = distances.clamp(max=self.clamp_len)
        cosines, sines = turns(distances, self.embed_dim, WAVELENGTH_BASE, self.content_bias.dtype)
        encoded = torch.cat([sines, cosines], dim=-1)[:, : self.embed_dim]
        encoded = self.position_proj(encoded).view(keys + 1, self.num_heads, self.head_dim)
        by_place = torch.einsum("tbhd,phd->bhtp", q * self.head_dim**-0.5, encoded).flatten(2)
        return by_place[:, :, time - 1 : time - 1 + time * keys].unflatten(2, (time, keys))

    def _visible(self, seen: Tensor, keys: int) -> Tensor:
        """The keys that the last positions see, (batch, 1, time, keys); one row if all rows are alike.

        `seen`, (batch, time), is the number of positions of its document before each.
        """
        places = torch.arange(keys, device=seen.device)
        # How many positions each key lies before each query; those after it are beyond every limit.
        age = places[keys - seen.shape[1] :, None] - places
        age = age.masked_fill(age < 0, keys)
        return age <= (seen.clamp(max=self.memory) if self.same_length else seen)[:, None, :, None]

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, memory={self.memory}"
