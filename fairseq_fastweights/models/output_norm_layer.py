"""A decoder layer whose norms are behind its parts, as in OLMo 2."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerConfig
from torch import Tensor

from fairseq_fastweights.models.mixer_layers import MixerBuilder, MixerDecoderLayer


class OutputNormDecoderLayer(MixerDecoderLayer):
    """x + norm_1(mixer(x)), and then x + norm_2(feed_forward(x)), with the parameters of fairseq's layer.

    Raises:
        ValueError: for options that this form of a layer cannot have.
    """

    def __init__(self, cfg: TransformerConfig, build_mixer: MixerBuilder) -> None:
        if not cfg.decoder.normalize_before:
            raise ValueError("output_norm_layers is set; it needs decoder_normalize_before, which is not")
        for name in ("scale_attn", "scale_heads", "scale_fc", "scale_resids"):
            if getattr(cfg, name, False):
                raise ValueError(f"{name} is set; with output_norm_layers it must not be")
        super().__init__(cfg, build_mixer, no_encoder_attn=True)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, None, None]:
        """Computes the layer."""
        starts = options.pop("starts", None)
        computed: tuple[Tensor, None, None] = self.run(self._compute, arguments, options, starts)
        return computed

    @staticmethod
    def _compute(
        own: Any,
        x: Tensor,
        *,
        incremental_state: dict[Any, Any] | None = None,
        self_attn_padding_mask: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None, None]:
        mixed, _ = own.self_attn(x, None, None, self_attn_padding_mask, incremental_state)
        x = x + own.dropout_module(own.self_attn_layer_norm(mixed))
        hidden = own.fc2(own.activation_dropout_module(own.activation_fn(own.fc1(x))))
        return x + own.dropout_module(own.final_layer_norm(hidden)), None, None
