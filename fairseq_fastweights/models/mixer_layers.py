"""fairseq's Transformer layers with mixers in place of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.quant_noise import quant_noise
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.layers import MixerLayer, form_of_layer
from fairseq_fastweights.mixers.mixer import Mixer, State, in_rows

MixerBuilder = Callable[[int], Mixer]
"""A function that makes a layer's mixer from the layer's width."""

# Copies of a layer's weights, side by side for a fused kernel. The kernel computes softmax attention alone, and fairseq
# fills them only on loading, so that here they would be parameters which nothing uses and nothing trains.
_FUSED = [f"{name}_{kind}" for name in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]


class SegmentState(dict[Mixer, State]):
    """An incremental state for whole segments: reads the state after the last segment, writes that after this one.

    The two are stored apart, so that a layer that is computed twice (activation checkpointing) starts in the same state
    both times.

    Args:
        carried: the states after the last segment, by mixer; empty for none.
        continues: (batch,), true for rows that continue from their state; those of other rows start as zeros.

    Raises:
        ValueError: if rows continue a batch that had another number of rows.
    """

    def __init__(self, carried: dict[Mixer, State], continues: Tensor) -> None:
        rows = {x.shape[0] for buffer in carried.values() for x in buffer.values()}
        fits = rows <= {continues.shape[0]}
        if not fits and bool(continues.any()):
            raise InvalidInput(
                f"continues has {continues.shape[0]} rows, but the segments before had {rows.pop()}; rows can only "
                "continue a batch of the same size"
            )
        super().__init__(
            {
                key: {
                    name: torch.where(continues.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros_like(x))
                    for name, x in buffer.items()
                }
                for key, buffer in (carried.items() if fits else ())
            }
        )
        self._written: dict[Mixer, State] = {}

    @classmethod
    def starting(cls, states: dict[Mixer, State]) -> SegmentState:
        """A segment that starts in these states, in all rows."""
        segment = cls({}, torch.zeros(0, dtype=torch.bool))
        dict.update(segment, states)
        return segment

    def __setitem__(self, mixer: Mixer, state: State) -> None:
        self._written[mixer] = state

    def detached(self) -> dict[Mixer, State]:
        """The states in which the next segment starts. A layer that LayerDrop dropped keeps the state before."""
        return {
            key: {name: x.detach() for name, x in buffer.items()}
            for key, buffer in {**dict(self.items()), **self._written}.items()
        }


def _run_with_states(
    layer: FairseqMixerLayer, x: Tensor, states: dict[str, State | None] | None, overwrite: bool, given: dict[str, Any]
) -> tuple[Any, dict[str, State | None] | None]:
    """Computes a layer, as it is compiled; returns its result and, if there are states, its mixers' new ones by name.

    By name, as a graph that knows states by their mixers would be one for each layer.
    """
    after = None if states is None else dict(states)
    return layer.read(x, partial(layer.run_mixer, states=after, overwrite=overwrite), **given), after


@cache
def _compiled() -> Callable[..., Any]:
    # All layers share this function, and may be of several kinds, with and without padding, states and documents.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(_run_with_states)


class FairseqMixerLayer(MixerLayer):
    """Base class of fairseq's layers with mixers, which have the parameters of fairseq's layers and take the same.

    Attributes:
        compiles: whether torch.compile makes one graph of the layer in training, the same for all layers of a kind.
    """

    compiles = False

    def read(self, x: Tensor, run_mixer: Callable[..., Tensor], **given: Any) -> Any:
        """Computes the layer by `compute`.

        Args:
            x: (time, batch, embed_dim).
            run_mixer: the layer's own method of this name, which knows the mixers' states.
            given: the other arguments of the layer.
        """
        raise NotImplementedError

    def run(self, x: Tensor, incremental_state: dict[Any, Any] | None, **given: Any) -> Any:
        """Computes the layer with the states that `incremental_state` has of its mixers, and writes the new ones there.

        A segment's states, and those of a text that is being generated, have their mixers as keys.
        """
        mixers = dict(self.mixers())
        states = None if incremental_state is None else {name: incremental_state.get(m) for name, m in mixers.items()}
        # A graph calls no hooks of modules in it, as those of fairseq's search for where NaN comes from.
        if self.compiles and self.training and not any(module._forward_hooks for module in self.children()):
            # Contiguous, as the layers before give it: another layout would be another graph.
            result, after = _compiled()(self, x.contiguous(), states, False, {**given, "incremental_state": None})
        else:
            # A segment may be computed twice from the same state; in generation each state is read once.
            overwrite = incremental_state is not None and not isinstance(incremental_state, SegmentState)
            given["incremental_state"] = incremental_state
            result, after = _run_with_states(self, in_rows(x), states, overwrite, given)
        if incremental_state is not None:
            for name, state in after.items():
                incremental_state[mixers[name]] = state
        return result

    def mixers(self) -> Iterator[tuple[str, Mixer]]:
        """The layer's mixers, with their names."""
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


class MixerEncoderLayer(FairseqMixerLayer, TransformerEncoderLayerBase):
    """An encoder layer with a mixer, which `build_mixer` makes from the layer's width."""

    def __init__(self, cfg: TransformerConfig, build_mixer: MixerBuilder) -> None:
        self._build_mixer = build_mixer
        super().__init__(cfg)
        for name in _FUSED:
            delattr(self, name)
        self.can_use_fastpath = False
        self.form = form_of_layer(cfg.encoder.normalize_before)

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return _with_fairseqs_noise(self._build_mixer(embed_dim), cfg)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
        """Computes fairseq's layer with the mixer for attention, which has no use for a mask."""
        out: Tensor = self.run(x, None, padding=encoder_padding_mask)
        return out

    def read(  # type: ignore[override]
        self, x: Tensor, run_mixer: Callable[..., Tensor], *, padding: Tensor | None, incremental_state: None
    ) -> Tensor:
        return self.compute(x, lambda x: run_mixer("self_attn", x, padding))

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Accepts a state of fairseq's layer too, and drops its second copies of weights."""
        super().upgrade_state_dict_named(state_dict, name)
        TransformerEncoderLayerBase.upgrade_state_dict_named(self, state_dict, name)
        for copy in _FUSED:
            state_dict.pop(f"{name}.{copy}", None)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        nn.Module._load_from_state_dict(self, *arguments)  # fairseq's fills the copies


class MixerDecoderLayer(FairseqMixerLayer, TransformerDecoderLayerBase):
    """A decoder layer with mixers, or with fairseq's attention if a builder is None.

    Args:
        cfg: the configuration of the model.
        build_mixer, build_cross_mixer: make the mixers that read the target and the source.
        no_encoder_attn: whether there is no source.
        form: that of `MixerLayer`; "" for that of `cfg`.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        build_mixer: MixerBuilder | None = None,
        build_cross_mixer: MixerBuilder | None = None,
        no_encoder_attn: bool = False,
        form: str = "",
    ) -> None:
        self._builders = build_mixer, build_cross_mixer
        super().__init__(cfg, no_encoder_attn=no_encoder_attn)
        self.form = form or form_of_layer(cfg.decoder.normalize_before)

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

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[Any, Any] | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Computes fairseq's layer with mixers for attention; `starts` marks documents, where there is no source.

        Returns:
            (time, batch, embed_dim), and as in fairseq the weights of attention, None of a mixer, and None.
        """
        given |= {"encoder_out": encoder_out, "encoder_padding_mask": encoder_padding_mask}
        return *self.run(x, incremental_state, **given), None

    def read(  # type: ignore[override]
        self: Any,
        x: Tensor,
        run_mixer: Callable[..., Tensor],
        *,
        encoder_out: Tensor | None,
        encoder_padding_mask: Tensor | None,
        incremental_state: dict[Any, Any] | None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        weights = None  # of the source, by fairseq's own attention

        def mix(x: Tensor) -> Tensor:
            if isinstance(self.self_attn, Mixer):
                y = run_mixer("self_attn", x, self_attn_padding_mask, starts=starts)
            else:
                y, _ = self.self_attn(
                    x,
                    x,
                    x,
                    key_padding_mask=self_attn_padding_mask,
                    incremental_state=incremental_state,
                    need_weights=False,
                    attn_mask=self_attn_mask,
                )
            if self.c_attn is not None:
                y = (y.unflatten(-1, (self.nh, self.head_dim)) * self.c_attn[:, None]).flatten(-2)
            return y if self.attn_ln is None else self.attn_ln(y)

        def read_source(x: Tensor) -> Tensor:
            nonlocal weights
            if isinstance(self.encoder_attn, Mixer):
                return run_mixer("encoder_attn", x, encoder_padding_mask, source=encoder_out)
            y, weights = self.encoder_attn(
                x,
                encoder_out,
                encoder_out,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                static_kv=True,
                need_weights=need_attn or need_head_weights or (not self.training and self.need_attn),
                need_head_weights=need_head_weights,
            )
            return y

        reads_source = self.encoder_attn is not None and encoder_out is not None
        return self.compute(x, mix, read_source if reads_source else None), weights


def wrap_layer(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Wraps a layer for activation checkpointing and sharding if the options ask for them, as fairseq does."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # As in fairseq: a layer whose activations are checkpointed is always wrapped.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def compile_layers(model: nn.Module) -> None:
    """Lets torch.compile make a graph of each kind of layer that has a mixer, when it is first trained."""
    for module in model.modules():
        if isinstance(module, FairseqMixerLayer):
            module.compiles = True


def project(output_layer: Callable[..., Tensor], features: Tensor, **options: Any) -> Tensor:
    """Runs an output layer on (batch, time, width); single tokens, as in generation, form one matrix.

    Given (batch, 1, width), torch would read all weights of the vocabulary once for every row.
    """
    if features.shape[1] != 1:
        return output_layer(in_rows(features), **options)
    return output_layer(features[:, 0], **options).unsqueeze(1)


def _with_fairseqs_noise(mixer: Mixer, cfg: TransformerConfig) -> Mixer:
    """Applies fairseq's options for dropout at inference and for quantisation noise to a mixer."""
    for name, module in list(mixer.named_children()):
        if isinstance(module, nn.Dropout):
            setattr(mixer, name, FairseqDropout(module.p, module_name=type(mixer).__name__))
        elif isinstance(module, nn.Linear):
            quant_noise(module, cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
    return mixer
