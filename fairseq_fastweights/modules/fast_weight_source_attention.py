"""Attention to a source as a whole: an encoder's to its own input, and a decoder's to what the encoder made of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.modules.memory_attention import MemoryAttention
from fairseq_fastweights.modules.update_rules import UPDATE_RULES, lookup
from fairseq_fastweights.ops.autocast import without_autocast


class FastWeightSourceAttention(MemoryAttention):
    """One memory per head is written from all of a source, and every query reads it.

    With s over the positions of the source that are not padding (Katharopoulos et al. 2020, Eq. 5):

        S = sum_s v_s phi(k_s)^T,  z = sum_s phi(k_s)
        out_t = W_out (scale * S phi(q_t) / (z . phi(q_t)))

    In generation S and z are computed with the first token and kept: a token costs the same for every length of the
    source, and the hypotheses of a beam search share one memory.

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: how many heads share it.
        update_rule: "sum"; the only rule that does not depend on an order.
        options: as for `MemoryAttention`, without `normalization`, which is "attention".

    Raises:
        ValueError: naming the argument, what it was and what it may be.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, update_rule: str = "sum", **options: Any) -> None:
        check_without_order("update_rule", update_rule)
        super().__init__(
            embed_dim, num_heads, update_rule=update_rule, normalization=frozenset({"attention"}), **options
        )
        self.beam_size = 1
        self._scales = "queries and source"
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        need_weights: bool = False,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """Writes the memory from the source, unless generation has done so before, and reads it for every query.

        Args:
            query: (time, batch, embed_dim).
            key, value: (source time, batch, source_dim), one and the same tensor: the source.
            key_padding_mask: (batch, source time), true where the source is padding.
            incremental_state: where given, the source's memory is taken from it, or put there.
            static_kv, need_weights, need_head_weights: taken for fairseq's sake. A source is static in any case, and
                there are no weights to return.
            attn_mask: None; a memory cannot hide parts of a source from some of the queries.

        Returns:
            (time, batch, embed_dim), and None for the attention weights.
        """
        if attn_mask is not None:
            raise ValueError("attn_mask must be None: every query reads all of the source")
        buffer = self._get_input_buffer(incremental_state)
        if not buffer and (key is None or value is not key):
            raise ValueError("key and value must be the same tensor, the source")
        q = self._heads(self.q_proj(query), self.feature_map.key_dim)
        if buffer:
            # The map takes both: a random one has to use one draw for the two. There are no keys any more.
            q, _, _ = self._features(q, q[:, :0], query)
        else:
            assert key is not None
            copies = 1
            if incremental_state is not None:
                copies = self._copies(key, key_padding_mask)
                key, key_padding_mask = (
                    key[:, ::copies],
                    None if key_padding_mask is None else key_padding_mask[::copies],
                )
            k = self._heads(self.k_proj(key), self.feature_map.key_dim)
            v = self._heads(self.v_proj(key), self.head_dim)
            padding = None if key_padding_mask is None else key_padding_mask.to(torch.bool)[:, :, None, None]
            if padding is not None and k.shape[1]:
                # FAVOR+ divides the features of a row by the largest of them. Were that padding's, whose keys are
                # short, those of words with long keys would vanish: padding takes a word's key, until it is left out.
                word = padding.to(torch.uint8).argmin(dim=1, keepdim=True)
                k = torch.where(padding, k.detach().take_along_dim(word, dim=1), k)
            q, k, v = self._features(q, k, v)
            if padding is not None:
                k = k.masked_fill(padding, 0)
            with without_autocast(k):
                buffer = {"state": torch.einsum("bshm,bshv->bhmv", k, v), "z": k.sum(dim=1)}
            if incremental_state is not None:
                self._set_input_buffer(incremental_state, buffer)
                self.set_incremental_state(incremental_state, "copies", copies)
        return self._project_out(self._read(q, **buffer), query), None

    def _read(self, q: Tensor, state: Tensor, z: Tensor) -> Tensor:
        """Reads with queries whose rows come in groups, one group for each row of the state."""
        batch, time, heads, features = q.shape
        rows = state.shape[0]
        with without_autocast(q):
            q = q.to(state.dtype).reshape(rows, batch * time // max(rows, 1), heads, features)
            out = self._divide(
                torch.einsum("bthm,bhmv->bthv", q, state), torch.einsum("bthm,bhm->bth", q, z)[..., None]
            )
        return out.reshape(batch, time, heads, self.head_dim)

    def set_beam_size(self, beam_size: int) -> None:
        """Says that in generation rows may come in groups of `beam_size` for the same source."""
        self.beam_size = beam_size

    def _copies(self, source: Tensor, padding_mask: Tensor | None) -> int:
        """How many rows in a row are copies of each other, in all of the batch: `beam_size`, or 1."""
        rows = source.shape[1]
        if self.beam_size == 1 or rows == 0 or rows % self.beam_size:
            return 1
        groups = source.unflatten(1, (-1, self.beam_size))
        same = torch.equal(groups, groups[:, :, :1].expand_as(groups))
        if same and padding_mask is not None:
            groups = padding_mask.unflatten(0, (-1, self.beam_size))
            same = torch.equal(groups, groups[:, :1].expand_as(groups))
        return self.beam_size if same else 1

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> dict[str, Any]:
        """Takes the rows `new_order` of the queries' batch, as beam search asks for."""
        buffer = self._get_input_buffer(incremental_state)
        if not buffer:
            return incremental_state
        rows, copies = buffer["state"].shape[0], self.get_incremental_state(incremental_state, "copies")
        sources = (new_order // copies).tolist()
        if sources == [row for row in range(rows) for _ in range(copies)]:
            return incremental_state  # hypotheses changed places, each with others for the same source
        kept = sources[::copies]
        if sources != [row for row in kept for _ in range(copies)]:
            kept, copies = sources, 1
        order = torch.tensor(kept, dtype=torch.int64, device=new_order.device)
        self._set_input_buffer(incremental_state, {name: x.index_select(0, order) for name, x in buffer.items()})
        self.set_incremental_state(incremental_state, "copies", copies)
        return incremental_state


def check_without_order(argument: str, update_rule: str) -> None:
    """Raises a `ValueError` for rules that have no meaning where a source is read as a whole."""
    if lookup(argument, update_rule, UPDATE_RULES).ordered:
        able = ", ".join(name for name, rule in UPDATE_RULES.items() if not rule.ordered)
        raise ValueError(
            f"{argument} is {update_rule!r}; it must be {able}: what is read as a whole has no order in which a memory "
            "could forget or correct"
        )
