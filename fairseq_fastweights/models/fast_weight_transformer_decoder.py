"""fairseq's Transformer decoder for translation, with fast weights in place of any of its attentions."""

from __future__ import annotations

from typing import Any

from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from torch import Tensor, nn

from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.modules.transformer_layers import (
    AttentionBuilder,
    FastWeightDecoderLayer,
    project,
    wrap_layer,
)


class FastWeightTransformerDecoder(TransformerDecoderBase):
    """A translation model's decoder.

    Args:
        cfg, dictionary, embed_tokens: as fairseq's.
        build_self_attention, build_encoder_attention: make a layer's attention to the target and to the source, given
            the layer's width; None for fairseq's.

    The buffer `settings_version` says what must be equal between a checkpoint and the model that loads it.
    """

    settings_version: Tensor

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        build_self_attention: AttentionBuilder | None,
        build_encoder_attention: AttentionBuilder | None,
    ) -> None:
        self._builders = build_self_attention, build_encoder_attention
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn=cfg.no_cross_attention)
        settings = checkpoint_settings.describe_dictionary(dictionary, "target ")
        settings |= checkpoint_settings.describe_attention(self, "decoder ", "self_attn")
        settings |= checkpoint_settings.describe_attention(self, "cross ", "encoder_attn")
        self.register_buffer(checkpoint_settings.NAME, checkpoint_settings.encode(settings))

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        if self._builders == (None, None):
            return super().build_decoder_layer(cfg, no_encoder_attn)
        return wrap_layer(FastWeightDecoderLayer(cfg, *self._builders, no_encoder_attn=no_encoder_attn), cfg)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any,
        incremental_state: Any = None,
        full_context_alignment: bool = False,
        *arguments: Any,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """`forward` without the output layer, as fairseq's decoder has it.

        Raises:
            ValueError: if the target is to be read with what follows, which a memory cannot hold.
        """
        if full_context_alignment and self._builders[0] is not None:
            raise ValueError(
                "full_context_alignment must be False: a memory holds what was read before, not what follows"
            )
        features, extra = super().extract_features(
            prev_output_tokens, encoder_out, incremental_state, full_context_alignment, *arguments, **options
        )
        if self._builders[1] is not None:
            # Not [None]: fairseq's scorer adds it to the weights of an ensemble's other models.
            extra["attn"] = None
        return features, extra

    def output_layer(self, features: Tensor) -> Tensor:
        """fairseq's output layer."""
        return project(super().output_layer, features)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor | None:
        """fairseq's mask, (time, time), if the self-attention is one that needs it."""
        return super().buffered_future_mask(tensor) if self._builders[0] is None else None

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Checks that the checkpoint was made by a model with these settings, before any weight is loaded."""
        checkpoint_settings.check(state_dict, name, self.settings_version)
        return super().upgrade_state_dict_named(state_dict, name)
