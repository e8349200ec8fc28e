"""Decoder layers whose norms and sums stand elsewhere than in fairseq's, with the parameters of its pre-norm layer."""

from __future__ import annotations

from typing import Any, ClassVar

from fairseq.models.transformer import TransformerConfig
from torch import Tensor

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models.mixer_layers import MixerBuilder, MixerDecoderLayer


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

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, None, None]:
        """Computes the layer."""
        starts = options.pop("starts", None)
        return self.run(self._run, arguments, options, starts), None, None

    @classmethod
    def _run(
        cls,
        own: Any,
        x: Tensor,
        *,
        incremental_state: dict[Any, Any] | None = None,
        self_attn_padding_mask: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        def mix(x: Tensor) -> Tensor:
            mixed: Tensor = own.self_attn(x, None, None, self_attn_padding_mask, incremental_state)[0]
            return mixed

        def feed_forward(x: Tensor) -> Tensor:
            hidden: Tensor = own.fc2(own.activation_dropout_module(own.activation_fn(own.fc1(x))))
            return hidden

        return cls._compute(own, x, mix, feed_forward)

    @staticmethod
    def _compute(own: Any, x: Tensor, mix: Any, feed_forward: Any) -> Tensor:
        raise NotImplementedError


class ParallelDecoderLayer(_OtherForm):
    """x + mixer(norm_1(x)) + feed_forward(norm_2(x)), as in GPT-NeoX.

    Raises:
        ValueError: for options that this form of a layer cannot have.
    """

    option = "parallel_residual"

    @staticmethod
    def _compute(own: Any, x: Tensor, mix: Any, feed_forward: Any) -> Tensor:
        mixed, hidden = mix(own.self_attn_layer_norm(x)), feed_forward(own.final_layer_norm(x))
        return x + own.dropout_module(mixed) + own.dropout_module(hidden)


class OutputNormDecoderLayer(_OtherForm):
    """x + norm_1(mixer(x)), and then x + norm_2(feed_forward(x)), as in OLMo 2.

    Raises:
        ValueError: for options that this form of a layer cannot have.
    """

    option = "output_norm_layers"

    @staticmethod
    def _compute(own: Any, x: Tensor, mix: Any, feed_forward: Any) -> Tensor:
        x = x + own.dropout_module(own.self_attn_layer_norm(mix(x)))
        return x + own.dropout_module(own.final_layer_norm(feed_forward(x)))
