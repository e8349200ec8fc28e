"""Attention to a whole source: of an encoder to its own input, and of a decoder to the encoder's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.linear_attention import LinearAttention
from fairseq_fastweights.mixers.mixer import State, check_mask, in_rows
from fairseq_fastweights.ops.checks import without_autocast


class FastWeightSourceAttention(LinearAttention):
    """Linear attention to a whole source: one state per head, which every query reads.

    With s over the positions of the source that are not padding (Katharopoulos et al. 2020, Eq. 5):

        S = sum_s v_s phi(k_s)^T,  z = sum_s phi(k_s)
        out_t = W_out (scale * S phi(q_t) / (z . phi(q_t)))

    In generation S and z are computed with the first token and kept. A token then takes the same time for every length
    of the source, and the hypotheses of a beam search share one state.

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        feature_map: a key of `feature_maps.FEATURE_MAPS`; None for "elu", that of Katharopoulos et al.
        **options: the other arguments of `LinearAttention`. The normalisation is "attention".

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> layer = FastWeightSourceAttention(16, 2)
        >>> queries, source = torch.randn(4, 3, 16), torch.randn(9, 3, 16)  # (time, batch, width)
        >>> whole, memory = layer(queries, source=source)
        >>> last, _ = layer(queries[3:], memory)  # the source is not read again
        >>> torch.allclose(last, whole[3:], atol=1e-5)
        True
    """

    reads_source = True

    def __init__(self, embed_dim: int, num_heads: int, *, feature_map: str | None = None, **options: Any) -> None:
        super().__init__(
            embed_dim, num_heads, feature_map=feature_map or "elu", normalization=frozenset({"attention"}), **options
        )
        self._scales = "queries and source"
        self.reset_parameters()

    def mix(
        self,
        x: Tensor,
        state: State | None,
        padding: Tensor | None,
        starts: Tensor | None,
        in_place: bool,
        *,
        source: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Computes the source's state, unless there is one, and its output for every query.

        Args:
            x: (time, batch, embed_dim), the queries.
            state: the state that an earlier call returned; the source is then not read again.
            padding: (batch, source time), true where the source is padding.
            starts: None.
            in_place: has no effect, as nothing changes a source's state.
            source: (source time, batch, source_dim), or with `batch_first` (batch, source time, source_dim); None for
                `x` itself, as in an encoder.

        Returns:
            (time, batch, embed_dim), and the source's state. It has one row for each source; in generation these are
            fewer than the rows of the batch, by a factor of `beam_size`.
        """
        q = self._heads(self.q_proj(x), self.feature_map.key_dim)
        if state is not None:
            if (rows := len(state["z"])) and x.shape[1] % rows:
                raise InvalidInput(
                    f"state['z'] has {rows} rows; they must be the sources of a batch of {x.shape[1]}"
                    f"{self.order_read(x)}"
                )
            # The map takes both: a random one has to use one draw for the two. There are no keys any more.
            q, _, _ = self._features(q, q[:, :0], x)
        else:
            if source is None:
                source = x
            elif self.batch_first:
                source = source.transpose(0, 1)
            if source.shape[1] != x.shape[1]:
                raise InvalidInput(
                    f"source has a batch of {source.shape[1]}; it must be {x.shape[1]}, that of x{self.order_read(x)}"
                )
            if padding is not None:
                check_mask("padding", padding, source, self)
            copies = self._copies(source, padding)
            source = in_rows(source[:, ::copies])
            padding = None if padding is None else padding[::copies, :, None, None]
            # (sources, source time, heads, dim)
            k = self._heads(self.k_proj(source), self.feature_map.key_dim)
            v = self._heads(self.v_proj(source), self.head_dim)
            if padding is not None and k.shape[1]:
                # FAVOR+ divides the features of a row by the largest of them. Were that padding's, whose keys are
                # short, those of tokens with long keys would vanish: padding takes a token's key, until it is left out.
                token = padding.to(torch.uint8).argmin(dim=1, keepdim=True)
                k = torch.where(padding, k.detach().take_along_dim(token, dim=1), k)
            q, k, v = self._features(q, k, v)
            if padding is not None:
                k = k.masked_fill(padding, 0)
            with without_autocast(k):  # S = sum_s v_s phi(k_s)^T, z = sum_s phi(k_s)
                state = {"state": torch.einsum("bshm,bshv->bhmv", k, v), "z": k.sum(dim=1)}
            state["copies"] = torch.full((k.shape[0],), copies)
        return self._project_out(self._read(q, state["state"], state["z"]), x), state

    def _read(self, q: Tensor, state: Tensor, z: Tensor) -> Tensor:
        """S phi(q) / (z . phi(q)) for queries whose rows come in groups, one group for each row of the state."""
        batch, time, heads, features = q.shape
        rows = state.shape[0]
        with without_autocast(q):
            # (sources, queries of all hypotheses of a source, heads, features)
            q = q.to(state.dtype).reshape(rows, batch * time // max(rows, 1), heads, features)
            z_q = torch.einsum("bthm,bhm->bth", q, z)[..., None]
            out = self._divide(torch.einsum("bthm,bhmv->bthv", q, state), z_q)
        return out.reshape(batch, time, heads, self.head_dim)

    def _copies(self, source: Tensor, padding_mask: Tensor | None) -> int:
        """The number of successive rows that are copies of each other throughout the batch: `beam_size`, or 1."""
        rows = source.shape[1]
        # Where gradients are wanted it is not generation: to compare would make a GPU wait.
        if torch.is_grad_enabled() or self.beam_size == 1 or rows == 0 or rows % self.beam_size:
            return 1
        groups = source.unflatten(1, (-1, self.beam_size))
        same = torch.equal(groups, groups[:, :, :1].expand_as(groups))
        if same and padding_mask is not None:
            groups = padding_mask.unflatten(0, (-1, self.beam_size))
            same = torch.equal(groups, groups[:, :1].expand_as(groups))
        return self.beam_size if same else 1

    def reorder(self, state: State, order: Tensor) -> State:
        """Returns the state for the rows `order` of the queries, for beam search."""
        rows = state["state"].shape[0]
        if rows == 0:
            return state
        copies = int(state["copies"][0])
        # Row i of the queries reads the state of source i // copies.
        sources = (order // copies).tolist()
        if sources == [row for row in range(rows) for _ in range(copies)]:
            return state  # hypotheses changed places, each with others for the same source
        # The source of each group of successive rows, as long as the rows of a group have one in common.
        kept = sources[::copies]
        if sources != [row for row in kept for _ in range(copies)]:
            kept, copies = sources, 1
        chosen = torch.tensor(kept, dtype=torch.int64, device=order.device)
        memory = {name: state[name].index_select(0, chosen) for name in ("state", "z")}
        return {**memory, "copies": torch.full((len(kept),), copies)}
