"""Causal softmax attention, with or without a rotary position embedding and grouped keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import State, in_rows, option, project, within_documents
from fairseq_fastweights.mixers.projections import Attention, shared
from fairseq_fastweights.mixers.rotary_embedding import RotaryEmbedding, rotate


class SoftmaxMixer(Attention):
    """Base class of mixers with a softmax. Projections are drawn in the order in which fairseq's attention draws them.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim` unless `head_dim` is given.
        bias: whether the projections have biases.
        **others: `dropout` of the attention weights, `batch_first`, and the arguments of `Projections`.
    """

    _drawing_order = "kvq"

    def __init__(self, embed_dim: int, num_heads: int, *, bias: bool = True, **others: Any) -> None:
        super().__init__(embed_dim, num_heads, **others)
        self._make_projections(bias, self.head_dim, embed_dim)

    def _heads(self, x: Tensor) -> Tensor:
        """(time, batch, heads * dim) -> (batch, heads, time, dim), without a copy."""
        return x.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)

    def _join_heads(self, x: Tensor) -> Tensor:
        """(batch, heads, time, dim) -> (time, batch, heads * dim), rows of one matrix."""
        return in_rows(x.permute(2, 0, 1, 3).flatten(2))

    def _dropout(self) -> float:
        """The probability of dropout of attention weights: 0 in evaluation."""
        drops = self.training or getattr(self.dropout_module, "apply_during_inference", False)  # fairseq's
        return self.dropout_module.p if drops else 0.0


class SoftmaxAttention(SoftmaxMixer):
    """A Transformer's causal self-attention (Vaswani et al. 2017, Eq. 1).

        out = W_out softmax(q k^T / sqrt(head_dim)) v

    With `rotary_dim` queries and keys are rotated by their positions in their documents (Su et al. 2021), as in
    GPT-NeoX; padding takes no position. The state, which grows with the text, holds rotated keys. Parameters have
    fairseq's names.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim` unless `head_dim` is given.
        rotary_dim: number of dimensions of each head that are rotated, from the first: even, at most the size of a
            head; 0 for none.
        rotary_base: the slowest pair of dimensions rotates once in about 2 pi x base positions.
        rotary_scaling: "linear:FACTOR", "llama3:FACTOR,LOW,HIGH,POSITIONS", or empty.
        dropout: of the attention weights.
        output_gate: whether the output is multiplied by sigmoid(W_gate x) before the output projection (Qwen3.5).
        joint_norm: whether `query_key_norm_eps` is that of one norm over all heads, not of one in each (OLMo 2).
        **shape: `batch_first`, and `kv_heads`, `head_dim`, `projection_bias`, `query_key_norm_eps` and
            `zero_centered_norms`, which `Projections` describes.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = SoftmaxAttention(16, 2, rotary_dim=4)(torch.randn(7, 3, 16))  # (time, batch, embed_dim)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'keys': (3, 2, 7, 8), 'values': (3, 2, 7, 8)}
    """

    output_gate: bool = option(False, "multiply the output of softmax attention by a gate, as Qwen3.5")
    joint_norm: bool = option(
        False, "let --query-key-norm-eps be that of one norm over all heads of queries or keys, as in OLMo 2"
    )

    carries = False
    bounded = True
    takes_attention = True
    takes_starts = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
        rotary_scaling: str = "",
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **self.take_options(options))
        if self.joint_norm:
            if self._shape.query_key_norm_eps is None:
                raise InvalidInput("joint_norm is set; it needs query_key_norm_eps, which is not")
            self.q_norm, self.k_norm = (self._shape.norm(p.out_features) for p in (self.q_proj, self.k_proj))
        if self.output_gate:
            self.output_gate_proj = nn.Linear(embed_dim, self.q_proj.out_features, bias=self.q_proj.bias is not None)
        self.rotary = RotaryEmbedding(rotary_dim, rotary_base, rotary_scaling, self.head_dim)
        self.needs_positions = rotary_dim == 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does; a gate starts at 1/2."""
        super().reset_parameters()
        if self.output_gate:
            for parameter in self.output_gate_proj.parameters():
                nn.init.zeros_(parameter)

    def mix(
        self, x: Tensor, state: State | None, padding: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        time, batch, _ = x.shape
        q, k, v = project(x, [self.q_proj, self.k_proj, self.v_proj])
        # (batch, heads, time, head_dim)
        if self.joint_norm:
            q, k, v = map(self._heads, (self.q_norm(q), self.k_norm(k), v))
        else:
            q, k, v = self.q_norm(self._heads(q)), self.k_norm(self._heads(k)), self._heads(v)
        before = 0 if state is None else state["keys"].shape[2]
        if self.rotary.dim:
            # Before keys are kept: a rotated key never changes, as scores depend on differences of positions alone.
            turned = self.rotary.turns(_positions(state, padding, starts, x), x.dtype)
            q, k = rotate(q, *turned), rotate(k, *turned)
        if state is not None:
            # Keys of earlier calls first: (batch, heads of keys, keys, head_dim).
            k, v = _append(state["keys"], k, in_place), _append(state["values"], v, in_place)
            # Padding of earlier calls stays in the KV cache, and its mask with it: (batch, keys).
            if "padding" in state or padding is not None:
                parts = (state.get("padding"), before), (padding, time)
                padding = torch.cat(
                    [x.new_zeros(batch, n, dtype=torch.bool) if mask is None else mask for mask, n in parts], dim=1
                )
        # The number of each key's document in its row; earlier keys belong to number 0.
        documents = None if starts is None else F.pad(starts.cumsum(dim=1), (before, 0))
        # A constant, as torch.compile would make a symbol of the comparison, which attention does not take.
        causal = True if padding is None and documents is None and before == 0 and time > 1 else False  # noqa: SIM210
        if time == 1:  # heads that share keys become queries of one head, so that keys need not be repeated
            q, keys, values = q.reshape(batch, k.shape[1], self.num_heads // k.shape[1], self.head_dim), k, v
        else:
            keys, values = shared(k, self.num_heads, 1), shared(v, self.num_heads, 1)
        # softmax(q k^T / sqrt(head_dim)) v
        out = F.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=_visible(time, before + time, padding, documents, x.device),
            dropout_p=self._dropout(),
            is_causal=causal,
        )
        out = self._join_heads(out.reshape(batch, self.num_heads, time, self.head_dim))
        out = self.out_proj(out * self.output_gate_proj(x).sigmoid() if self.output_gate else out)
        if documents is not None:  # later calls see the last document alone
            past = documents != documents[:, -1:]
            padding = past if padding is None else padding | past
        return out, {"keys": k, "values": v, **({} if padding is None else {"padding": padding})}

    def settings(self) -> dict[str, float | str]:
        """The settings that names and shapes of parameters do not show."""
        return self.rotary.settings()

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, rotary_dim={self.rotary.dim}, rotary_base={self.rotary.base:g}"


def _append(earlier: Tensor, added: Tensor, in_place: bool) -> Tensor:
    """Puts `added` behind `earlier`, (batch, heads, time, head_dim), in its memory if `in_place` and there is room.

    A tensor returned in place has room for a quarter more, so that a decode step does not copy the whole KV cache.
    """
    batch, heads, before, dim = earlier.shape
    after = before + added.shape[2]
    if not in_place or torch.compiler.is_compiling():
        return torch.cat([earlier, added], dim=2)
    # The steps that the memory of `earlier` has room for, if an earlier call made it.
    capacity = earlier.stride(1) // dim
    strides = heads * capacity * dim, capacity * dim, dim, 1
    size = batch * heads * capacity * dim * earlier.itemsize
    made = earlier.stride() == strides and earlier.storage_offset() == 0
    if not made or earlier.untyped_storage().nbytes() != size or capacity < after:
        capacity = after + max(64, after // 4)
        strides = heads * capacity * dim, capacity * dim, dim, 1
        room = earlier.new_empty(batch, heads, capacity, dim)
        room[:, :, :before] = earlier
        earlier = room
    longer = earlier.as_strided((batch, heads, after, dim), strides)
    longer[:, :, before:] = added
    return longer


def _positions(state: State | None, padding: Tensor | None, starts: Tensor | None, x: Tensor) -> Tensor:
    """The positions of a call's tokens in their documents: (time,), or (batch, 1, time) if rows may differ."""
    time, batch, _ = x.shape
    before: Any = 0 if state is None else state["keys"].shape[2]
    earlier = None if state is None else state.get("padding")
    if padding is None and starts is None and earlier is None:
        return torch.arange(before, before + time, device=x.device)
    if earlier is not None:  # which marks earlier documents too
        before = (~earlier).sum(dim=1)
    real = torch.ones(batch, time, dtype=torch.bool, device=x.device) if padding is None else ~padding
    return within_documents(starts, real.cumsum(dim=1) - 1, 0, before)[0][:, None]


def _visible(
    time: int, keys: int, padding: Tensor | None, documents: Tensor | None, device: torch.device
) -> Tensor | None:
    """The keys that each of the last `time` positions sees; None if torch's own causal mask, or no mask, does."""
    if padding is None and documents is None and (time == 1 or time == keys):
        return None
    # The queries are the last `time` of the keys' positions.
    itself = torch.arange(keys - time, keys, device=device)
    others = torch.arange(keys, device=device)
    visible = others <= itself[:, None]  # (time, keys)
    if documents is not None:
        visible = visible & (documents[:, None, keys - time :, None] == documents[:, None, None, :])
    if padding is None:
        return visible
    # Every position sees itself, padding too: a softmax over nothing is not a number.
    return (visible & ~padding[:, None, None, :]) | (others == itself[:, None])
