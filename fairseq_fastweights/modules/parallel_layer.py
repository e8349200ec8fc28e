"""A Transformer layer whose attention and feed-forward network read the same input, as GPT-NeoX's."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerConfig
from torch import Tensor

from fairseq_fastweights.modules.transformer_layers import AttentionBuilder, FastWeightDecoderLayer


class ParallelDecoderLayer(FastWeightDecoderLayer):
    """x + attention(norm_1(x)) + feed_forward(norm_2(x)), with the parameters of fairseq's pre-norm layer.

    Args:
        cfg: of the model.
        build_self_attention: makes the layer's attention; None for fairseq's.

    Raises:
        ValueError: for options that this form of a layer cannot have.
    """

    def __init__(self, cfg: TransformerConfig, build_self_attention: AttentionBuilder | None = None) -> None:
        if not cfg.decoder.normalize_before:
            raise ValueError("parallel_residual is set; it needs decoder_normalize_before, which is not")
        for name in ("scale_attn", "scale_heads", "scale_fc", "scale_resids"):
            if getattr(cfg, name, False):
                raise ValueError(f"{name} is set; with parallel_residual it must not be")
        super().__init__(cfg, build_self_attention, no_encoder_attn=True)

    def forward(
        self,
        x: Tensor,
        encoder_out: None = None,
        encoder_padding_mask: None = None,
        incremental_state: dict[str, Any] | None = None,
        prev_self_attn_state: None = None,
        prev_attn_state: None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, None, None]:
        """As fairseq's layer: x is (time, batch, embed_dim); what concerns a source or weights is ignored."""
        normed = self.self_attn_layer_norm(x)
        attended, _ = self.self_attn(
            query=normed,
            key=normed,
            value=normed,
            key_padding_mask=self_attn_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        hidden = self.activation_dropout_module(self.activation_fn(self.fc1(self.final_layer_norm(x))))
        return x + self.dropout_module(attended) + self.dropout_module(self.fc2(hidden)), None, None
