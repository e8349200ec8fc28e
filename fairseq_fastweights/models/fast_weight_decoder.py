"""fairseq's Transformer decoder for language models, with mixers in place of its self-attention."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.layers import MASKED_LOGIT, form_of_layer, use_rms_norms, use_swiglu
from fairseq_fastweights.mixers.mixer import Mixer, State, check_mask, within_documents
from fairseq_fastweights.mixers.registry import MIXERS, build_mixer
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.cuda_graphs import GraphedFunction
from fairseq_fastweights.models.description import mixer_settings, parse_layers
from fairseq_fastweights.models.host_copies import contains
from fairseq_fastweights.models.mixer_layers import MixerDecoderLayer, SegmentState, project, wrap_layer

logger = logging.getLogger(__name__)


class FastWeightDecoder(checkpoint_settings.Recorded, TransformerDecoder):
    """A language model's decoder.

    Unlike fairseq's decoder, it can read a text in segments that start with the state of the segment before
    (`continues` of `forward`), and it can skip the output layer for positions that are not scored (`last_positions`).

    Args:
        args: the model's configuration.
        dictionary, embed_tokens: those of fairseq's decoder.
        mixers: the name of each layer's mixer.

    Attributes:
        mixers: those of the layers, in order.
        mixer_names: their names, in the same order.
        masked_symbols: numbers of the symbols that the model never predicts (mask_special_symbols); empty in most
            models.
    """

    _masked_symbols: Tensor

    def __init__(self, args: Any, dictionary: Dictionary, embed_tokens: nn.Module, *, mixers: Sequence[str]) -> None:
        self.mixer_names = list(mixers)
        self._settings = mixer_settings(args, args.decoder_attention_heads)
        self._output_norms = parse_layers(args.output_norm_layers, len(mixers), "output_norm_layers")
        self._layers_built = 0
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn=True)
        if args.rms_norm_eps is not None:
            use_rms_norms(self, args.rms_norm_eps, args.zero_centered_norms)
        settings = checkpoint_settings.describe(args, dictionary, list(zip(self.mixer_names, self.mixers, strict=True)))
        self.record(settings)
        masked = (dictionary.bos(), dictionary.pad(), dictionary.unk()) if args.mask_special_symbols else ()
        self.masked_symbols: tuple[int, ...] = masked
        self.register_buffer("_masked_symbols", torch.tensor(masked, dtype=torch.long), persistent=False)
        # By training mode, so that a validation in mid-epoch leaves the training streams' states alone.
        self._carried: dict[bool, dict[Mixer, State]] = {True: {}, False: {}}
        self._graphed: GraphedFunction | None = None
        if self.embed_positions is None and (layers := self._layers_where("needs_positions", True)):
            logger.warning(
                "no_token_positional_embeddings is set, but there is no information about positions in %s", layers
            )

    def record_layers(self, options: Any) -> None:
        """Lets all layers together be replayed as CUDA graphs in training, where shapes do not change.

        `options`, those of the model, say whether it is an error if that is not possible.
        """
        self._graphed = GraphedFunction(self._graph_of_layers, self.layers, options)

    @property
    def mixers(self) -> list[Mixer]:
        return [module for module in self.modules() if isinstance(module, Mixer)]

    def _layers_where(self, attribute: str, value: bool) -> str:
        """Lists the layers whose mixers have a value of an attribute, for messages; empty if there are none."""
        numbers: dict[str, list[str]] = {}
        for number, (name, mixer) in enumerate(zip(self.mixer_names, self.mixers, strict=True), 1):
            if getattr(mixer, attribute) == value:
                numbers.setdefault(name, []).append(str(number))
        return "; ".join(f"layers {', '.join(found)} ({name})" for name, found in numbers.items())

    def carried_states(self) -> list[State]:
        """The states in which the next segments of training start: for each layer its tensors (rows, ...), on the CPU.

        Empty if no state was carried. A layer that LayerDrop has dropped every time so far has an empty dictionary.
        """
        carried = self._carried[True]
        if not carried:
            return []
        return [{name: x.cpu() for name, x in carried.get(mixer, {}).items()} for mixer in self.mixers]

    def restore_carried_states(self, states: list[State]) -> None:
        """Lets the next segments of training start in states that `carried_states` returned.

        Raises:
            ValueError: if there is not one for each layer.
        """
        mixers = self.mixers
        if len(states) != len(mixers):
            raise InvalidInput(f"states has {len(states)} layers; the model has {len(mixers)}")
        device = self.settings_version.device
        self._carried[True] = {
            mixer: {name: x.to(device) for name, x in state.items()}
            for mixer, state in zip(mixers, states, strict=True)
            if state
        }

    def build_decoder_layer(self, args: Any, no_encoder_attn: bool = False) -> nn.Module:
        # fairseq asks for one layer after the other, and does not say which.
        name = self.mixer_names[self._layers_built]
        self._layers_built += 1
        cfg, args = TransformerConfig.from_namespace(args), self.args
        form = form_of_layer(
            cfg.decoder.normalize_before, args.parallel_residual, self._layers_built in self._output_norms
        )
        layer = MixerDecoderLayer(cfg, partial(build_mixer, name, settings=self._settings), None, True, form)
        if args.swiglu:
            use_swiglu(layer)
        if args.rms_norm_eps is not None:
            use_rms_norms(layer, args.rms_norm_eps, args.zero_centered_norms)
        return wrap_layer(layer, cfg)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict[Any, Any] | None = None,
        features_only: bool = False,
        src_lengths: Tensor | None = None,
        continues: Tensor | None = None,
        last_positions: int | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes logits (or the adaptive softmax's input) for every position, or for the last ones.

        Args:
            prev_output_tokens: (batch, time).
            incremental_state: the state in generation, in which only the last token is read.
            features_only: whether to leave out the output layer.
            continues: (batch,), true for rows that continue the same row of the batch before. Their states start as
                that batch left them, without gradients; those of other rows start empty. None: all start empty and
                nothing is kept.
            last_positions: number of positions at the end of each row that are returned; None for all.
            starts: (batch, time), true where a document begins, which is read as if it stood alone, also in rows that
                `continues` marks. None: no document begins.
            encoder_out, src_lengths: ignored; fairseq's decoder has them.

        Returns:
            (batch, positions, vocabulary), and a dictionary with the layers' outputs under "inner_states".

        Raises:
            ValueError: if `continues` is given and a layer's state cannot be carried, or rows continue a batch of
                another size; if `starts` has another shape, or is given in generation or to layers that cannot take it.
        """
        segment = None if continues is None else self._open_segment(continues)
        x, extra = self.extract_features(
            prev_output_tokens,
            incremental_state=incremental_state if segment is None else segment,
            last_positions=last_positions,
            starts=starts,
        )
        # Without gradients: truncated backpropagation through time ends at the segment's edge.
        if segment is not None:
            self._carried[self.training] = segment.detached()
        if not features_only:
            x = self.output_layer(x)
        return x, extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict[Any, Any] | SegmentState | None = None,
        last_positions: int | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """`forward` without the output layer.

        fairseq's own version cuts the input down to its last token wherever there is an incremental state; this one
        does so for generation only, not for segments.
        """
        # A segment of a text is read whole, unlike the one token of a decode step, though both start from states.
        generating = incremental_state is not None and not isinstance(incremental_state, SegmentState)
        if starts is not None:
            if generating:
                raise InvalidInput("starts is given; in generation it must be None: a text goes on")
            self.check_takes_starts()
            check_mask("starts", starts, prev_output_tokens.t())
            starts = starts & ~prev_output_tokens.eq(self.padding_idx)
        positions = None
        if self.embed_positions is not None and starts is not None:
            positions = self._positions_in_documents(prev_output_tokens, starts)
        elif self.embed_positions is not None:
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
        # (batch, time, width) -> (time, batch, width), the layout of fairseq's layers.
        x = self.dropout_module(x).transpose(0, 1)

        # None without padding: mixers then take a shorter way.
        padding_mask = tokens.eq(self.padding_idx) if contains(tokens, self.padding_idx) else None
        replayed = self.training and self._graphed is not None and self._graphed.is_possible(x)
        run = self._replay_layers if replayed else self._run_layers
        inner_states = run(x, incremental_state, padding_mask, starts)
        x = inner_states[-1]
        # Before norm and output layer, whose cost is that of the positions left.
        if last_positions is not None:
            x = x[max(0, x.shape[0] - last_positions) :]
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, {"attn": [None], "inner_states": inner_states}

    def _run_layers(
        self, x: Tensor, states: dict[Any, Any] | None, padding_mask: Tensor | None, starts: Tensor | None
    ) -> list[Tensor]:
        """The layers' input and their outputs."""
        inner_states = [x]
        for layer in self.layers:
            x, _, _ = layer(x, incremental_state=states, self_attn_padding_mask=padding_mask, starts=starts)
            inner_states.append(x)
        return inner_states

    def _replay_layers(
        self, x: Tensor, segment: dict[Any, Any] | None, padding_mask: Tensor | None, starts: Tensor | None
    ) -> list[Tensor]:
        """The same as a CUDA graph, which has the last output alone."""
        assert self._graphed is not None
        mixers = self.mixers
        # A graph knows tensors by their places: states go in and come out as lists, in the order of layers.
        before = None if segment is None else [segment.get(mixer) for mixer in mixers]
        out, after = self._graphed(x, before, padding_mask, starts)
        if segment is not None:
            for mixer, state in zip(mixers, after, strict=True):
                segment[mixer] = state
        return [x, out]

    def _graph_of_layers(
        self, x: Tensor, before: list[State | None] | None, padding_mask: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, list[State] | None]:
        """The recorded function: from an input and the mixers' states to the last output and the states after it."""
        if before is None:
            return self._run_layers(x, None, padding_mask, starts)[-1], None
        mixers = self.mixers
        segment = SegmentState.starting({mixer: s for mixer, s in zip(mixers, before, strict=True) if s is not None})
        out = self._run_layers(x, segment, padding_mask, starts)[-1]
        after = segment.detached()
        return out, [after[mixer] for mixer in mixers]

    def _positions_in_documents(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """The positional embeddings of tokens, (batch, time), counted from where their documents begin in the row."""
        padding = tokens.eq(self.padding_idx)
        before = (~padding).cumsum(dim=1) - 1
        places, _ = within_documents(starts, before, tokens.shape[1], 0)
        # Of one row without padding: whatever kind they are, they say how positions are numbered.
        every = self.embed_positions(torch.full_like(tokens[:1], self.padding_idx + 1))[0]
        return F.embedding(places.clamp(min=0), every).masked_fill(padding[..., None], 0)

    def output_layer(self, features: Tensor, **options: Any) -> Tensor:
        """Runs fairseq's output layer; masked symbols get logits that make their probabilities 0."""
        logits = project(super().output_layer, features, **options)
        if len(self._masked_symbols):
            logits = logits.index_fill_(-1, self._masked_symbols, MASKED_LOGIT)
        return logits

    def max_positions(self) -> int:
        """The length of the longest text that the decoder can read; a very large number if nothing limits it."""
        if self.embed_positions is None and not any(mixer.bounded for mixer in self.mixers):
            return sys.maxsize
        return super().max_positions()

    def check_carries(self) -> None:
        """Raises a `ValueError` if there are layers whose state cannot be carried from segment to segment."""
        if layers := self._layers_where("carries", False):
            raise InvalidInput(
                f"carry_over_state is set, but states cannot be carried over through {layers}: they grow with the "
                "text, or end with it; it must not be set, or these layers must have another mixer"
            )

    def check_takes_starts(self) -> None:
        """Raises a `ValueError` if there are layers that cannot keep the documents of a row apart."""
        if layers := self._layers_where("takes_starts", False):
            unable = {name for name, mixer in zip(self.mixer_names, self.mixers, strict=True) if not mixer.takes_starts}
            able = ", ".join(name for name, kind in MIXERS.items() if kind.takes_starts and name not in unable)
            raise InvalidInput(
                f"separate_documents is set, but documents cannot be kept apart in {layers}; it must not be set, or "
                f"these layers must have another mixer, of {able}"
            )

    def _open_segment(self, continues: Tensor) -> SegmentState:
        self.check_carries()
        carried = self._carried[self.training]
        if not carried and bool(continues.any()):
            logger.warning(
                "rows continue segments that this process has not seen, as after a restart in the middle of an epoch: "
                "their states start empty"
            )
        return SegmentState(carried, continues)
