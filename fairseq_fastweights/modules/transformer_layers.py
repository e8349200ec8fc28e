"""fairseq's Transformer layers with other attention in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

AttentionBuilder = Callable[[int], nn.Module]
"""Makes the attention of a layer, given the layer's width."""

# Copies of a layer's weights, side by side for a fused kernel. The kernel computes softmax attention alone, and fairseq
# fills them only on loading, so that here they would be parameters which nothing uses and nothing trains.
_FUSED = (
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "fc1_weight",
    "fc1_bias",
    "fc2_weight",
    "fc2_bias",
)


class FastWeightEncoderLayer(TransformerEncoderLayerBase):
    """An encoder layer whose self-attention is what `build_attention` makes for its width."""

    def __init__(self, cfg: TransformerConfig, build_attention: AttentionBuilder) -> None:
        self._build_attention = build_attention
        super().__init__(cfg)
        for name in _FUSED:
            delattr(self, name)
        self.can_use_fastpath = False

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return self._build_attention(embed_dim)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Takes the state of one of fairseq's layers too, without its copies of weights."""
        super().upgrade_state_dict_named(state_dict, name)
        for copy in _FUSED:
            state_dict.pop(f"{name}.{copy}", None)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        nn.Module._load_from_state_dict(self, *arguments)  # fairseq's fills the copies


class FastWeightDecoderLayer(TransformerDecoderLayerBase):
    """A decoder layer with other attention; where a builder is None, with fairseq's.

    Args:
        cfg: of the model.
        build_self_attention, build_encoder_attention: make the layer's attention to the target and to the source.
        no_encoder_attn: whether there is no attention to a source.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        build_self_attention: AttentionBuilder | None = None,
        build_encoder_attention: AttentionBuilder | None = None,
        no_encoder_attn: bool = False,
    ) -> None:
        self._builders = build_self_attention, build_encoder_attention
        super().__init__(cfg, no_encoder_attn=no_encoder_attn)

    def build_self_attention(self, embed_dim: int, cfg: Any, **options: Any) -> nn.Module:
        build, _ = self._builders
        return super().build_self_attention(embed_dim, cfg, **options) if build is None else build(embed_dim)

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        _, build = self._builders
        return super().build_encoder_attention(embed_dim, cfg) if build is None else build(embed_dim)


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """What fairseq does with each layer that it builds: activation checkpointing and sharding, where asked for."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # As in fairseq: a layer whose activations are checkpointed is always wrapped.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def project(output_layer: Callable[..., Tensor], features: Tensor, **options: Any) -> Tensor:
    """Runs an output layer on (batch, time, width); on single tokens, as in generation, as on a matrix.

    On a batch of matrices of one row each torch would read all of the vocabulary's weights once for every row.
    """
    if features.shape[1] != 1:
        return output_layer(features, **options)
    return output_layer(features[:, 0], **options).unsqueeze(1)
