"""fairseq's Transformer layers with mixers in place of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.quant_noise import quant_noise
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_fastweights.mixers.mixer import Mixer, State
from fairseq_fastweights.models.segment_state import SegmentState

MixerBuilder = Callable[[int], Mixer]
"""A function that makes a layer's mixer from the layer's width."""

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


class _Attention:
    """Calls a mixer in the way in which fairseq's layers call their attention.

    Args:
        mixer: the mixer.
        starts: marks documents, or is None.
        name: what its state is found by in a layer that is compiled; None for the mixer itself.
    """

    def __init__(self, mixer: Mixer, starts: Tensor | None, name: str | None) -> None:
        self._mixer, self._key = mixer, mixer if name is None else name
        self._options = {} if starts is None else {"starts": starts}

    def __call__(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[Any, Any] | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Mixes `query`, (time, batch, embed_dim). The state is read from `incremental_state` and written there."""
        options: dict[str, Any] = self._options if key is None or key is query else {"source": key}
        state = None if incremental_state is None else incremental_state.get(self._key)
        # A segment may be computed twice from the same state; the state of a text that is being written is read once.
        overwrite = self._key is self._mixer and not isinstance(incremental_state, SegmentState)
        padding = None if key_padding_mask is None else key_padding_mask.bool()
        x, state = self._mixer(query, state, padding, overwrite=overwrite, **options)
        if incremental_state is not None:
            incremental_state[self._key] = state
        return x, None

    def _get_input_buffer(self, incremental_state: Any) -> None:
        """Returns {} when fairseq's layer asks for the keys of its attention."""


class _AsFairseqs:
    """Presents a layer to the code of fairseq's layers, with its mixers as attention."""

    def __init__(self, layer: nn.Module, starts: Tensor | None, by_name: bool = False) -> None:
        self._layer, self._starts, self._by_name = layer, starts, by_name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._layer, name)
        return _Attention(found, self._starts, name if self._by_name else None) if isinstance(found, Mixer) else found


def _run_with_states(
    forward: Callable[..., Any],
    layer: nn.Module,
    starts: Tensor | None,
    states: dict[str, State | None] | None,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Any, dict[str, State | None] | None]:
    """Runs `forward` on a layer; returns its result and its mixers' states by name. This is what is compiled.

    By name, as a graph that knows states by their mixers would be one for each layer.
    """
    if states is not None:
        states = dict(states)
        options = options | {"incremental_state": states}
    return forward(_AsFairseqs(layer, starts, by_name=True), *arguments, **options), states


@cache
def _compiled() -> Callable[..., Any]:
    # All layers share this function, and may be of several kinds, with and without padding, states and documents.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(_run_with_states)


class MixerLayer(nn.Module):
    """Base class that adds mixers to fairseq's layers.

    Attributes:
        compiles: whether torch.compile makes one graph of the layer in training, the same for all layers of a kind.
    """

    compiles = False

    def run(
        self, forward: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], starts: Any = None
    ) -> Any:
        """Runs a layer's forward pass in fairseq's form, in which mixers are its attention."""
        # A graph calls no hooks of modules in it, as those of fairseq's search for where NaN comes from.
        watched = any(module._forward_hooks for module in self.children())
        if watched or not (self.compiles and self.training):
            return forward(_AsFairseqs(self, starts), *arguments, **options)
        segment, names = options.pop("incremental_state", None), dict(self.mixers())
        states = None if segment is None else {name: segment.get(mixer) for name, mixer in names.items()}
        x, *others = arguments  # contiguous, as the layers before give it: another layout would be another graph
        result, states = _compiled()(forward, self, starts, states, (x.contiguous(), *others), options)
        for name, state in (states or {}).items():
            segment[names[name]] = state
        return result

    def mixers(self) -> Iterator[tuple[str, Mixer]]:
        """Its mixers, with their names."""
        return ((name, module) for name, module in self.named_children() if isinstance(module, Mixer))

    def reorder_incremental_state(self, incremental_state: dict[Any, Any], new_order: Tensor) -> None:
        """Selects the rows `new_order` of its mixers' states, for beam search."""
        for _, mixer in self.mixers():
            if mixer in incremental_state:
                incremental_state[mixer] = mixer.reorder(incremental_state[mixer], new_order)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Splits the one matrix of queries, keys and values that attention had in fairseq until 2019."""
        for place, _ in self.mixers():
            for kind in ("weight", "bias"):
                joined = state_dict.pop(f"{name}.{place}.in_proj_{kind}", None)
                if joined is not None:
                    for projection, part in zip(("q_proj", "k_proj", "v_proj"), joined.chunk(3), strict=True):
                        state_dict[f"{name}.{place}.{projection}.{kind}"] = part


class MixerEncoderLayer(MixerLayer, TransformerEncoderLayerBase):
    """An encoder layer with a mixer, which `build_mixer` makes from the layer's width."""

    def __init__(self, cfg: TransformerConfig, build_mixer: MixerBuilder) -> None:
        self._build_mixer = build_mixer
        super().__init__(cfg)
        for name in _FUSED:
            delattr(self, name)
        self.can_use_fastpath = False

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return _with_fairseqs_noise(self._build_mixer(embed_dim), cfg)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Runs fairseq's layer."""
        return self.run(TransformerEncoderLayerBase.forward, arguments, options)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Accepts a state of fairseq's layer too, and drops its second copies of weights."""
        super().upgrade_state_dict_named(state_dict, name)
        TransformerEncoderLayerBase.upgrade_state_dict_named(self, state_dict, name)
        for copy in _FUSED:
            state_dict.pop(f"{name}.{copy}", None)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        nn.Module._load_from_state_dict(self, *arguments)  # fairseq's fills the copies


class MixerDecoderLayer(MixerLayer, TransformerDecoderLayerBase):
    """A decoder layer with mixers, or with fairseq's attention if a builder is None.

    Args:
        cfg: the configuration of the model.
        build_mixer, build_cross_mixer: make the mixers that read the target and the source.
        no_encoder_attn: whether there is no source.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        build_mixer: MixerBuilder | None = None,
        build_cross_mixer: MixerBuilder | None = None,
        no_encoder_attn: bool = False,
    ) -> None:
        self._builders = build_mixer, build_cross_mixer
        super().__init__(cfg, no_encoder_attn=no_encoder_attn)

    def build_self_attention(self, embed_dim: int, cfg: Any, **options: Any) -> nn.Module:
        build, _ = self._builders
        if build is None:
            return super().build_self_attention(embed_dim, cfg, **options)
        return _with_fairseqs_noise(build(embed_dim), cfg)

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        _, build = self._builders
        if build is None:
            return super().build_encoder_attention(embed_dim, cfg)
        return _with_fairseqs_noise(build(embed_dim), cfg)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Runs fairseq's layer; `starts`, which needs a layer without a source, goes to the mixer."""
        starts = options.pop("starts", None)
        return self.run(TransformerDecoderLayerBase.forward, arguments, options, starts)


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Wraps a layer for activation checkpointing and sharding if the options ask for them, as fairseq does."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # As in fairseq: a layer whose activations are checkpointed is always wrapped.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def compile_layers(model: nn.Module) -> None:
    """Lets torch.compile make a graph of each kind of layer that has a mixer, when it is first trained."""
    for module in model.modules():
        if isinstance(module, MixerLayer):
            module.compiles = True


def project(output_layer: Callable[..., Tensor], features: Tensor, **options: Any) -> Tensor:
    """Runs an output layer on (batch, time, width); single tokens, as in generation, form one matrix.

    Given (batch, 1, width), torch would read all weights of the vocabulary once for every row.
    """
    if features.shape[1] != 1:
        return output_layer(features, **options)
    return output_layer(features[:, 0], **options).unsqueeze(1)


def _with_fairseqs_noise(mixer: Mixer, cfg: TransformerConfig) -> Mixer:
    """Applies fairseq's options for dropout at inference and for quantisation noise to a mixer."""
    for name, module in list(mixer.named_children()):
        if isinstance(module, nn.Dropout):
            setattr(mixer, name, FairseqDropout(module.p, module_name=type(mixer).__name__))
        elif isinstance(module, nn.Linear):
            quant_noise(module, cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
    return mixer
