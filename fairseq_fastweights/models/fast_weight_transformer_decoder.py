"""fairseq's Transformer decoder for translation, with mixers in place of its attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.cuda_graphs import log_compiled_alone
from fairseq_fastweights.models.mixer_layers import MixerBuilder, MixerDecoderLayer, project, wrap_layer


class FastWeightTransformerDecoder(TransformerDecoderBase):
    """A translation model's decoder.

    Args:
        cfg, dictionary, embed_tokens: those of fairseq's decoder.
        mixers: for each layer the name of the mixer that reads the target, and a function that makes it from the
            layer's width; None for fairseq's softmax attention.
        cross: the same for the mixer that reads the source, in all layers.

    The buffer `settings_version` has the settings that must be equal in a checkpoint and the model that loads it.

    Attributes:
        tells_of_graphs: whether the next batch of training logs that compiled layers are not replayed as CUDA graphs.
    """

    settings_version: Tensor
    tells_of_graphs = False

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        mixers: Sequence[tuple[str, MixerBuilder | None]],
        cross: tuple[str, MixerBuilder | None],
    ) -> None:
        builders = [build for _, build in mixers]
        self._needs_future_mask, self._all_softmax = None in builders, not any(builders)
        cross_name, self._build_cross = cross
        self._builders = iter(builders)
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn=cfg.no_cross_attention)
        del self._builders
        layers: list[Any] = list(nn.ModuleList.__iter__(self.layers))  # all of them: those of LayerDrop are drawn
        settings = checkpoint_settings.describe_dictionary(dictionary, "target ")
        own = [(name, layer.self_attn) for (name, _), layer in zip(mixers, layers, strict=True)]
        settings |= checkpoint_settings.describe_mixers(own, "decoder ")
        settings |= checkpoint_settings.describe_mixers([(cross_name, self.layers[0].encoder_attn)], "cross ")
        self.register_buffer(checkpoint_settings.NAME, checkpoint_settings.encode(settings))

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        build = next(self._builders)
        if build is None and self._build_cross is None:
            return super().build_decoder_layer(cfg, no_encoder_attn)
        return wrap_layer(MixerDecoderLayer(cfg, build, self._build_cross, no_encoder_attn=no_encoder_attn), cfg)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any,
        incremental_state: Any = None,
        full_context_alignment: bool = False,
        *arguments: Any,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """`forward` without the output layer, as in fairseq's decoder.

        Raises:
            ValueError: for `full_context_alignment`, if a memory reads the target, as it is causal.
        """
        if full_context_alignment and not self._all_softmax:
            raise InvalidInput(
                "full_context_alignment must be False: a mixer holds what was read before, not what follows"
            )
        if self.training and self.tells_of_graphs:
            log_compiled_alone("batches of translations have many shapes")
            self.tells_of_graphs = False
        features, extra = super().extract_features(
            prev_output_tokens, encoder_out, incremental_state, full_context_alignment, *arguments, **options
        )
        if self._build_cross is not None:
            # Not [None]: fairseq's scorer adds it to the weights of an ensemble's other models.
            extra["attn"] = None
        return features, extra

    def output_layer(self, features: Tensor) -> Tensor:
        """Runs fairseq's output layer."""
        return project(super().output_layer, features)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor | None:
        """fairseq's mask, (time, time), if there is a self-attention that needs it."""
        return super().buffered_future_mask(tensor) if self._needs_future_mask else None

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Checks that the checkpoint was made by a model with these settings, before any weight is loaded."""
        checkpoint_settings.check(state_dict, name, self.settings_version)
        return super().upgrade_state_dict_named(state_dict, name)
