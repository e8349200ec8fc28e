"""Attention to slots that are written by position: a causal Linformer (Wang et al. 2020, Peng et al. 2022)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.mixers.bounded_memory_attention import BoundedMemoryAttention
from fairseq_fastweights.mixers.children import are_plain
from fairseq_fastweights.mixers.mixer import Option, State


class Linformer(BoundedMemoryAttention):
    """Causal Linformer: bounded-memory attention whose controls are learned for each position.

        phi_t, psi_t = the columns t of E and F, both slots x max_positions

    Linformer (Wang et al. 2020) projects all keys of a text to E K and all values to F V. Each slot then mixes all
    positions of the text, so that it cannot be used in a decoder. This is the causal form of Peng et al. 2022, whose
    numbers Mao 2022 quotes (Table 3: 2 x 64 slots): position t reads the sums up to itself, E[:, :t] K[:t] and
    F[:, :t] V[:t]. The last position of a text of `max_positions` reads the same in both. All heads share E and F.

    E and F have `max_positions` columns, so that no text can be longer.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        max_positions: the largest number of positions of a text.
        dropout: of the attention weights.
        bias: whether the projections have biases; E and F have none.
        slots: number of slots of each head.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and what is allowed.

    Examples:
        >>> layer = Linformer(16, 2, max_positions=9, slots=4)
        >>> text = torch.randn(9, 3, 16)  # (time, batch, embed_dim)
        >>> whole, _ = layer(text)
        >>> first, state = layer(text[:5])
        >>> rest, state = layer(text[5:], state)
        >>> torch.allclose(torch.cat([first, rest]), whole, atol=1e-5)
        True
    """

    options: ClassVar[dict[str, Option]] = {
        "slots": Option(int, 64, "number of slots for keys, and for values, in each head of Linformer")
    }
    carries = False
    bounded = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_positions: int,
        dropout: float = 0.0,
        bias: bool = True,
        slots: int = 64,
    ) -> None:
        super().__init__(embed_dim, num_heads, slots=slots, dropout=dropout, bias=bias)
        check_number("max_positions", max_positions, 1, whole=True)
        self.max_positions = max_positions
        # Layers, as in fairseq's Linformer, for the sake of their names and of who draws all layers' weights anew.
        self.compress_k = nn.Linear(max_positions, slots, bias=False)
        self.compress_v = nn.Linear(max_positions, slots, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and E and F as it draws those of keys and values."""
        super().reset_parameters()
        for module in (self.compress_k, self.compress_v):
            nn.init.xavier_uniform_(module.weight, gain=1 / math.sqrt(2))

    def _controls(self, x: Tensor, state: State | None, real: Tensor) -> tuple[Tensor, Tensor, None, State]:
        time, batch, _ = x.shape
        positions = real.cumsum(dim=1)
        if state is not None:
            positions = positions + state["read"][:, None]
        # Only where it may be too long does the CPU wait for a GPU, to say so. On meta there are no numbers.
        if (
            (state is not None or time > self.max_positions)
            and not x.is_meta
            and (end := max(positions[:, -1:].flatten().tolist(), default=0)) > self.max_positions
        ):
            raise InvalidInput(f"x ends at position {end} of a text; max_positions is {self.max_positions}")
        # Padding before a text has no position; it takes the first one's control, and the slots take nothing of it.
        columns = (positions - 1).clamp(min=0)
        modules = [self.compress_k, self.compress_v]
        if are_plain(modules):
            tables = [module.weight.t() for module in modules]
        else:  # whatever such a layer does with its weights, of each position it gives that position's column
            tables = [module(torch.eye(self.max_positions, dtype=x.dtype, device=x.device)) for module in modules]
        phi, psi = (
            F.embedding(columns, table)[:, :, None].expand(batch, time, self.num_heads, self.slots) for table in tables
        )
        return phi, psi, None, {}
