"""Decoder layers whose norms and sums stand elsewhere than in fairseq's, with the parameters of its pre-norm layer."""

from __future__ import annotations

from typing import Any, ClassVar

from fairseq.models.transformer import TransformerConfig
from torch import Tensor

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models.mixer_layers import Mix, MixerBuilder, MixerDecoderLayer


class _OtherForm(MixerDecoderLayer):
    """Base class. `option`: that which asks for the form."""

    option: ClassVar[str]

    def __init__(self, cfg: TransformerConfig, build_mixer: MixerBuilder) -> None:
        if not cfg.decoder.normalize_before:
            raise InvalidInput(f"{self.option} is set; it needs decoder_normalize_before, which is not")
        for name in ("scale_attn", "scale_heads", "scale_fc", "scale_resids"):
            if getattr(cfg, name, False):
                raise InvalidInput(f"{name} is set; with {self.option} it must not be")
        super().__init__(cfg, build_mixer, no_encoder_attn=True)


class ParallelDecoderLayer(_OtherForm):
    """x + mixer(norm_1(x)) + feed_forward(norm_2(x)), as in GPT-NeoX.

    Raises:
        ValueError: for options that this form of a layer cannot have.
    """

    option = "parallel_residual"

    def compute(
        self: Any,
        x: Tensor,
        mix: Mix,
        *,
        self_attn_padding_mask: Tensor | None = None,
        starts: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        mixed = mix("self_attn", self.self_attn_layer_norm(x), self_attn_padding_mask, starts=starts)
        hidden = self.feed_forward(self.final_layer_norm(x))
        return x + self.dropout_module(mixed) + self.dropout_module(hidden), None


class OutputNormDecoderLayer(_OtherForm):
    """x + norm_1(mixer(x)), and then x + norm_2(feed_forward(x)), as in OLMo 2.

    Raises:
        ValueError: for options that this form of a layer cannot have.
    """

    option = "output_norm_layers"

    def compute(
        self: Any,
        x: Tensor,
        mix: Mix,
        *,
        self_attn_padding_mask: Tensor | None = None,
        starts: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        mixed = mix("self_attn", x, self_attn_padding_mask, starts=starts)
        x = x + self.dropout_module(self.self_attn_layer_norm(mixed))
        return x + self.dropout_module(self.final_layer_norm(self.feed_forward(x))), None
