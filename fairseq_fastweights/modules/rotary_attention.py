"""Causal softmax attention with a rotary position embedding, as GPT-NeoX has it."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.modules.rotary_embedding import rotate, turns


class RotaryAttention(MultiheadAttention):
    """fairseq's self-attention, causal, whose queries and keys are turned by their positions (Su et al. 2021).

    Parameters and incremental state are fairseq's; the keys in the state are turned already. Position 0 is a row's
    first token, padding or not: what is read depends on differences of positions alone.

    Args:
        embed_dim, num_heads: width of the input and of the output, and how many heads share it.
        rotary_dim: how many of each head's dimensions are turned, from the first: even, from 2 to the head dim.
        rotary_base: the slowest pair of dimensions turns about once in 2 pi x base positions.
        options: as for fairseq's `MultiheadAttention`.

    Raises:
        ValueError: naming the argument, what it was and what it may be.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, rotary_dim: int, rotary_base: float = 10000.0, **options: Any
    ) -> None:
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads is {num_heads}; it must be a divisor of embed_dim, {embed_dim}")
        head_dim = embed_dim // num_heads
        if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim is {rotary_dim}; it must be an even number from 2 to the head dim, {head_dim}"
            )
        if not rotary_base > 0:
            raise ValueError(f"rotary_base is {rotary_base}; it must be positive")
        super().__init__(embed_dim, num_heads, self_attention=True, **options)
        self.rotary_dim = rotary_dim
        self.rotary_base = float(rotary_base)

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
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """Attends from every step of `query` to itself and to those before it.

        Args:
            query: (time, batch, embed_dim).
            key, value: None or `query` itself, as fairseq passes it.
            key_padding_mask: (batch, time), true where a position is padding: no other position attends to it.
            incremental_state: where given, the steps before are in it, and these are added to it.
            others: taken for fairseq's sake. No step can read a later one, and there are no weights to return.

        Returns:
            (time, batch, embed_dim), and None for the attention weights.
        """
        if (key is not None and key is not query) or (value is not None and value is not query):
            raise ValueError("key and value must be None or query itself: this is self-attention")
        time, batch, _ = query.shape
        q, k, v = (self._heads(projection(query)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        saved = {} if incremental_state is None else self._get_input_buffer(incremental_state)
        past_keys = saved.get("prev_key")
        before = 0 if past_keys is None else past_keys.shape[2]
        positions = torch.arange(before, before + time, device=query.device, dtype=torch.float32)
        turned = turns(positions, self.rotary_dim, self.rotary_base, query.dtype)
        q, k = rotate(q, *turned), rotate(k, *turned)
        if incremental_state is not None:
            if past_keys is not None:
                k, v = torch.cat([past_keys, k], dim=2), torch.cat([saved["prev_value"], v], dim=2)
            key_padding_mask = self._append_prev_key_padding_mask(
                key_padding_mask, saved.get("prev_key_padding_mask"), batch, before + time, False
            )
            saved = {"prev_key": k, "prev_value": v, "prev_key_padding_mask": key_padding_mask}
            self._set_input_buffer(incremental_state, saved)

        drops = self.training or self.dropout_module.apply_during_inference
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_visible(time, before + time, key_padding_mask, query.device),
            dropout_p=self.dropout_module.p if drops else 0.0,
            is_causal=key_padding_mask is None and before == 0 and time > 1,
        )
        return self.out_proj(out.permute(2, 0, 1, 3).reshape(time, batch, self.embed_dim)), None

    def _heads(self, x: Tensor) -> Tensor:
        """(time, batch, heads * dim) -> (batch, heads, time, dim), without a copy."""
        time, batch, _ = x.shape
        return x.view(time, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, rotary_dim={self.rotary_dim}, rotary_base={self.rotary_base:g}"


def _visible(time: int, keys: int, key_padding_mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Which keys each of the last `time` positions attends to; None where torch's own causal mask, or none, says it."""
    if key_padding_mask is None and (time == 1 or time == keys):
        return None
    # Every position sees itself, padding too: a softmax over nothing is not a number.
    itself = torch.arange(keys - time, keys, device=device)
    others = torch.arange(keys, device=device)
    visible = others <= itself[:, None]
    if key_padding_mask is None:
        return visible
    real = ~key_padding_mask.to(torch.bool)[:, None, None, :]
    return (visible & real) | (others == itself[:, None])
