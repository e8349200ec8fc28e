"""fairseq's Transformer decoder for language models, with fast weights in place of its self-attention."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from torch import Tensor, nn

from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.modules.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.modules.parallel_layer import ParallelDecoderLayer
from fairseq_fastweights.modules.segment_state import SegmentState
from fairseq_fastweights.modules.transformer_layers import (
    AttentionBuilder,
    FastWeightDecoderLayer,
    project,
    wrap_layer,
)

logger = logging.getLogger(__name__)

# The logit of a symbol that is masked. Its probability is 0 in every type: e^-104 is, in float32, and logits of -9,900
# do not occur. It is finite, and in float16's range, because label smoothing sums all log-probabilities: with infinity,
# or the type's lowest number, which three of overflow to it, the loss would be infinite, or NaN without smoothing.
MASKED_LOGIT = -1e4


class FastWeightDecoder(TransformerDecoder):
    """A language model's decoder: fast weights in all layers but `softmax_layers`.

    Besides what fairseq's decoder does, it reads segment after segment of a text with the state that the segment
    before left (`continues` of `forward`), and it leaves out the output layer for positions that nobody asked for
    (`last_positions`).

    Args:
        args: the model's configuration.
        dictionary, embed_tokens: as fairseq's.
        build_attention: makes the attention of a layer, given the layer's width.
        softmax_layers: numbers, from 1, of the layers that keep ordinary attention.
        build_softmax_attention: makes theirs; None for fairseq's.

    Attributes:
        masked_symbols: numbers of the symbols that the model never predicts (mask_special_symbols); most have none.
        settings_version: a buffer that says what must be equal between a checkpoint and the model that loads it.
    """

    settings_version: Tensor
    _masked_symbols: Tensor

    def __init__(
        self,
        args: Any,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        *,
        build_attention: AttentionBuilder,
        softmax_layers: frozenset[int],
        build_softmax_attention: AttentionBuilder | None = None,
    ) -> None:
        self._build_attention = build_attention
        self._build_softmax_attention = build_softmax_attention
        self.softmax_layers = softmax_layers
        self._layers_built = 0
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn=True)
        settings = describe(args, dictionary, softmax_layers)
        for attention in self.attention_modules():
            settings |= attention.settings()
            # Checkpoints from before these could differ have no such setting, and fit all the same.
            if attention.num_heads != args.decoder_attention_heads:
                settings["fast weight heads"] = attention.num_heads
        self.register_buffer(checkpoint_settings.NAME, checkpoint_settings.encode(settings))
        masked = (dictionary.bos(), dictionary.pad(), dictionary.unk()) if args.mask_special_symbols else ()
        self.masked_symbols: tuple[int, ...] = masked
        self.register_buffer("_masked_symbols", torch.tensor(masked, dtype=torch.long), persistent=False)
        # Rotary attention masks the future itself.
        self._needs_future_mask = bool(softmax_layers) and build_softmax_attention is None
        # By training mode, so that a validation in mid-epoch leaves the training streams' states alone.
        self._carried: dict[bool, dict[str, Any]] = {True: {}, False: {}}

    def attention_modules(self) -> list[FastWeightAttention]:
        """The fast weight attention of each layer that has it."""
        return [module for module in self.modules() if isinstance(module, FastWeightAttention)]

    def carried_states(self) -> list[dict[str, Tensor]]:
        """What training's next segments start from: for each fast weight layer its tensors (rows, ...), on the CPU.

        Empty if none was carried, and the dictionary of a layer that has been dropped (LayerDrop) from the start on.
        """
        carried = self._carried[True]
        if not carried:
            return []
        buffers = [carried.get(module.state_key, {}) for module in self.attention_modules()]
        return [{name: x.cpu() for name, x in buffer.items()} for buffer in buffers]

    def restore_carried_states(self, states: list[dict[str, Tensor]]) -> None:
        """Lets training's next segments start from what `carried_states` gave, for a batch of as many rows.

        Raises:
            ValueError: if these are not as many as the fast weight layers.
        """
        modules = self.attention_modules()
        if len(states) != len(modules):
            raise ValueError(f"states has {len(states)} layers; the model has {len(modules)} with fast weights")
        device = self.settings_version.device
        self._carried[True] = {
            module.state_key: {name: x.to(device) for name, x in buffer.items()}
            for module, buffer in zip(modules, states, strict=True)
            if buffer
        }

    def build_decoder_layer(self, args: Any, no_encoder_attn: bool = False) -> nn.Module:
        self._layers_built += 1
        build: AttentionBuilder | None = self._build_attention
        if self._layers_built in self.softmax_layers:
            if self._build_softmax_attention is None and not self.args.parallel_residual:
                return super().build_decoder_layer(args, no_encoder_attn)
            build = self._build_softmax_attention
        cfg = TransformerConfig.from_namespace(args)
        if self.args.parallel_residual:
            return wrap_layer(ParallelDecoderLayer(cfg, build), cfg)
        return wrap_layer(FastWeightDecoderLayer(cfg, build, no_encoder_attn=True), cfg)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict[str, Any] | None = None,
        features_only: bool = False,
        src_lengths: Tensor | None = None,
        continues: Tensor | None = None,
        last_positions: int | None = None,
        return_all_hiddens: bool = False,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes logits (or what the adaptive softmax takes) for every position, or for the last few.

        Args:
            prev_output_tokens: (batch, time).
            incremental_state: for generation: only the last token is read, from the state that this holds.
            features_only: whether to leave out the output layer.
            continues: (batch,), true for rows that continue the same row of the batch before. Their states start as
                that batch left them, without gradients; those of other rows start empty. None: all start empty and
                nothing is kept.
            last_positions: for how many positions at the end of each row something is returned; None for all.
            others: taken for fairseq's sake; there are no alignments.

        Returns:
            (batch, positions, vocabulary), and a dictionary with the layers' outputs under "inner_states".

        Raises:
            ValueError: if `continues` is given and a layer has ordinary attention, which has no state to carry, or
                rows continue a batch of another size.
        """
        segment = None if continues is None else self._open_segment(continues)
        x, extra = self.extract_features(
            prev_output_tokens,
            incremental_state=incremental_state if segment is None else segment,
            last_positions=last_positions,
        )
        if segment is not None:
            self._carried[self.training] = segment.detached()
        if not features_only:
            x = self.output_layer(x)
        return x, extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict[str, Any] | SegmentState | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
        last_positions: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """`forward` without the output layer.

        fairseq's own version cuts the input down to its last token wherever there is an incremental state; this one
        does so for generation only, not for segments.
        """
        generating = incremental_state is not None and not isinstance(incremental_state, SegmentState)
        positions = None
        if self.embed_positions is not None:
            positions = self.embed_positions(
                prev_output_tokens, incremental_state=incremental_state if generating else None
            )
        tokens = prev_output_tokens
        if generating:
            tokens = tokens[:, -1:]
            positions = None if positions is None else positions[:, -1:]
        x = self.embed_scale * self.embed_tokens(tokens.contiguous())
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if positions is not None:
            x = x + positions
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x).transpose(0, 1)

        padding_mask: Tensor | None = tokens.eq(self.padding_idx)
        if padding_mask is not None and not bool(padding_mask.any()):
            padding_mask = None
        future_mask = None
        if self._needs_future_mask and not generating:
            future_mask = self.buffered_future_mask(x)
        inner_states = [x]
        for layer in self.layers:
            x, _, _ = layer(
                x,
                incremental_state=incremental_state,
                self_attn_mask=future_mask,
                self_attn_padding_mask=padding_mask,
            )
            inner_states.append(x)
        if last_positions is not None:
            x = x[max(0, x.shape[0] - last_positions) :]
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, {"attn": [None], "inner_states": inner_states}

    def output_layer(self, features: Tensor, **options: Any) -> Tensor:
        """fairseq's output layer; symbols that are masked get logits with which their probabilities are 0."""
        logits = project(super().output_layer, features, **options)
        if len(self._masked_symbols):
            logits = logits.index_fill_(-1, self._masked_symbols, MASKED_LOGIT)
        return logits

    def max_positions(self) -> int:
        """The longest text the decoder can read; without limit where nothing depends on positions."""
        if self.embed_positions is None and not self.softmax_layers:
            return sys.maxsize
        return super().max_positions()

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Checks that the checkpoint was made by a model with these settings, before any weight is loaded."""
        checkpoint_settings.check(state_dict, name, self.settings_version)
        return super().upgrade_state_dict_named(state_dict, name)

    def _open_segment(self, continues: Tensor) -> SegmentState:
        if self.softmax_layers:
            numbers = ", ".join(map(str, sorted(self.softmax_layers)))
            raise ValueError(
                f"state cannot be carried over through layers with ordinary attention (layers {numbers}); use "
                "--carry-over-state without --softmax-attention-layers"
            )
        carried = self._carried[self.training]
        if not carried and bool(continues.any()):
            logger.warning(
                "rows continue segments that this process has not seen, as after a restart in the middle of an epoch: "
                "their states start empty"
            )
        return SegmentState(carried, continues)


def describe(args: Any, dictionary: Dictionary, softmax_layers: frozenset[int]) -> dict[str, Any]:
    """What tells a decoder from others whose parameters have the same names and shapes, but for its fast weights."""
    settings = checkpoint_settings.describe_dictionary(dictionary)
    settings["softmax attention layers"] = sorted(softmax_layers)
    if args.parallel_residual:
        settings["parallel residual"] = True
    if args.rotary_dim and softmax_layers:
        settings |= {"rotary dim": args.rotary_dim, "rotary base": args.rotary_base}
    return settings


def renumber(layers: Iterable[int], kept: list[int]) -> list[int]:
    """The numbers that layers, as far as they are `kept`, have once all others are gone. All count from 1."""
    return [place for place, number in enumerate(kept, 1) if number in layers]


def prune_settings(state_dict: dict[str, Any], name: str, kept: list[int]) -> None:
    """Makes a checkpoint's settings of the decoder `name` those of its layers `kept` alone, numbers from 1.

    Checkpoints of other models carry none, and stay as they are.
    """
    checkpoint_settings.rename_former(state_dict, name)
    key = f"{name}.{checkpoint_settings.NAME}"
    if key not in state_dict:
        return
    settings = checkpoint_settings.decode(state_dict[key])
    softmax = renumber(settings["softmax attention layers"], kept)
    settings["softmax attention layers"] = softmax
    # What is said of a kind of layers goes with the last of them.
    of_softmax = {"rotary dim", "rotary base"}
    of_all = {"dictionary size", "dictionary digest", "softmax attention layers", "parallel residual"}
    gone = set() if softmax else of_softmax
    if len(softmax) == len(kept):
        gone |= settings.keys() - of_softmax - of_all
    state_dict[key] = checkpoint_settings.encode({name: x for name, x in settings.items() if name not in gone})
