"""fairseq's Transformer encoder, with a mixer in place of its self-attention."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerEncoderBase
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.host_copies import on_host
from fairseq_fastweights.models.mixer_layers import MixerBuilder, MixerEncoderLayer, wrap_layer


class FastWeightTransformerEncoder(TransformerEncoderBase):
    """A translation model's encoder.

    Args:
        cfg, dictionary, embed_tokens: those of fairseq's encoder.
        name, build_mixer: the name of the mixer that reads the source, and a function that makes it from a layer's
            width; None for fairseq's softmax attention.

    The buffer `settings_version` has the settings that must be equal in a checkpoint and the model that loads it.
    """

    settings_version: Tensor

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        name: str,
        build_mixer: MixerBuilder | None,
    ) -> None:
        self._build_mixer = build_mixer
        super().__init__(cfg, dictionary, embed_tokens)
        settings = checkpoint_settings.describe_dictionary(dictionary, "source ")
        settings |= checkpoint_settings.describe_mixers([(name, self.layers[0].self_attn)], "encoder ")
        self.register_buffer(checkpoint_settings.NAME, checkpoint_settings.encode(settings))

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        if self._build_mixer is None:
            return super().build_encoder_layer(cfg)
        return wrap_layer(MixerEncoderLayer(cfg, self._build_mixer), cfg)

    def forward(self, src_tokens: Tensor, *arguments: Any, **options: Any) -> dict[str, list[Tensor]]:
        """Encodes sources, as fairseq's encoder does.

        Args:
            src_tokens: (batch, source time).
            arguments, options: those of fairseq's encoder.

        Raises:
            ValueError: if a source is longer than the model's positions.
        """
        most = self.max_positions()
        if src_tokens.shape[1] > most:  # padded, at least
            longest = int(on_host(src_tokens).ne(self.padding_idx).sum(dim=1).max())
            if longest > most:
                raise InvalidInput(
                    f"a source has {longest} tokens; the model takes at most {most} (--max-source-positions)"
                )
        return super().forward(src_tokens, *arguments, **options)

    def reorder_encoder_out(self, encoder_out: dict[str, list[Tensor]], new_order: Tensor) -> dict[str, list[Tensor]]:
        """Selects the rows `new_order`, for beam search.

        Hypotheses mostly change places with others for the same source. On a CPU nothing is copied then, because
        copying a long source takes as long as a token; on a GPU the check would take longer.
        """
        before = encoder_out.get("rows")  # of each row, which row it was when it left the encoder
        rows = new_order if before is None else before[0].index_select(0, new_order)
        if before is not None and rows.device.type == "cpu" and torch.equal(rows, before[0]):
            return encoder_out
        return {**super().reorder_encoder_out(encoder_out, new_order), "rows": [rows]}

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Checks that the checkpoint was made by a model with these settings, before any weight is loaded."""
        checkpoint_settings.check(state_dict, name, self.settings_version)
        return super().upgrade_state_dict_named(state_dict, name)
