"""The translation model `fast_weight_transformer`: its options, encoder and decoder, and named architectures."""

# No `from __future__ import annotations`: fairseq reads the types of a configuration's fields as they stand.

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
    base_architecture,
    transformer_iwslt_de_en,
    transformer_vaswani_wmt_en_de_big,
)
from fairseq.models.transformer.transformer_legacy import tiny_architecture
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import MIXERS, SOURCE_MIXERS, Kind, build_mixer
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.cuda_graphs import log_compiled_alone
from fairseq_fastweights.models.description import MEMORIES, check_heads, layer_mixers, mixer_settings
from fairseq_fastweights.models.fast_weight_options import (
    WHAT_MEMORIES_DO,
    FastWeightOptions,
    add_group,
    option,
    set_defaults,
)
from fairseq_fastweights.models.host_copies import on_host
from fairseq_fastweights.models.mixer_layers import (
    MixerBuilder,
    MixerDecoderLayer,
    MixerEncoderLayer,
    compile_layers,
    project,
    wrap_layer,
)
from fairseq_fastweights.models.option_checks import check_inference, check_ranges, read_cutoffs, register_architecture
from fairseq_fastweights.ops.backends import say_again

PLACES = ("encoder", "decoder", "cross")
"""The places of attention in the Transformer: within encoder and decoder, and from decoder to encoder ("cross")."""

_SOFTMAX = ("softmax", {"softmax": Kind(Mixer, ("dropout", "xformers_att_config"))})
"""fairseq's own attention, which reads none of the other settings."""


@dataclass
class FastWeightTransformerOptions(FastWeightOptions):
    """The options that `fast_weight_transformer` adds to those of fairseq's `transformer`."""

    fast_weight_attention: str = option(
        "encoder,decoder,cross",
        "which attentions are linear attention: comma-separated encoder, decoder (self-attention) and "
        "cross (from decoder to encoder), or none; the others are softmax. Encoder and cross always use the sum "
        "rule, as they read a whole source, which has no order to forget or correct in",
    )
    update_rule: ChoiceEnum(MEMORIES) = option(  # type: ignore[valid-type]
        "sum", f"update rule of linear attention in the decoder's self-attention: {WHAT_MEMORIES_DO}"
    )
    normalization: str = option(
        "auto",
        "normalisation of the decoder's self-attention: comma-separated sum, attention and removal (delta "
        "rule only), or none; auto is that of the rule's paper. Encoder and cross always use attention",
    )


class FastWeightTransformerEncoder(checkpoint_settings.Recorded, TransformerEncoderBase):
    """A translation model's encoder.

    Args:
        cfg, dictionary, embed_tokens: those of fairseq's encoder.
        name, build_mixer: the name of the mixer that reads the source, and a function that makes it from a layer's
            width; None for fairseq's softmax attention.
    """

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
        self.record(settings)

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
        # Counting tokens makes the CPU wait for a GPU: only where a padded source may be too long.
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


class FastWeightTransformerDecoder(checkpoint_settings.Recorded, TransformerDecoderBase):
    """A translation model's decoder.

    Args:
        cfg, dictionary, embed_tokens: those of fairseq's decoder.
        mixers: for each layer the name of the mixer that reads the target, and a function that makes it from the
            layer's width; None for fairseq's softmax attention.
        cross: the same for the mixer that reads the source, in all layers.

    Attributes:
        tells_of_graphs: whether the next batch of training logs that compiled layers are not replayed as CUDA graphs.
    """

    tells_of_graphs = False

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Dictionary,
        embed_tokens: nn.Module,
        mixers: Sequence[tuple[str, MixerBuilder | None]],
        cross: tuple[str, MixerBuilder | None],
    ) -> None:
        self._builders = [build for _, build in mixers]
        self._layers_built = 0
        cross_name, self._build_cross = cross
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn=cfg.no_cross_attention)
        layers: list[Any] = list(nn.ModuleList.__iter__(self.layers))  # all of them: those of LayerDrop are drawn
        settings = checkpoint_settings.describe_dictionary(dictionary, "target ")
        own = [(name, layer.self_attn) for (name, _), layer in zip(mixers, layers, strict=True)]
        settings |= checkpoint_settings.describe_mixers(own, "decoder ")
        settings |= checkpoint_settings.describe_mixers([(cross_name, self.layers[0].encoder_attn)], "cross ")
        self.record(settings)

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        # fairseq asks for one layer after the other, and does not say which.
        build = self._builders[self._layers_built]
        self._layers_built += 1
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
            ValueError: for `full_context_alignment`, if a mixer reads the target, as it is causal.
        """
        if full_context_alignment and any(self._builders):
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
        return super().buffered_future_mask(tensor) if None in self._builders else None


@register_model("fast_weight_transformer")
class FastWeightTransformerModel(TransformerModel):
    """fairseq's Transformer for translation with linear attention in place of any of its attentions.

    Schlag et al. 2021, Sec. 6.2, replace all three. Only the attention modules differ: all options of fairseq's
    `transformer` keep their meaning, and parameters keep their names.
    """

    @classmethod
    def hub_models(cls) -> dict[str, Any]:
        """None: the models on fairseq's hub are Transformers."""
        return {}

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds fairseq's options and this model's own."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, FastWeightTransformerOptions(), delete_default=True)

    @classmethod
    def add_groups(cls, parser: ArgumentParser) -> None:
        """Adds its own options to a parser, as a group; fairseq adds the others."""
        add_group(parser, "fast weight memories and other mixers", FastWeightTransformerOptions())

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "FastWeightTransformerModel":
        """Builds the model for a task's dictionaries.

        Raises:
            ValueError: for options that contradict each other, before anything is built.
        """
        set_defaults(args, FastWeightTransformerOptions, FairseqDataclass)
        check_ranges(args)
        say_again()  # which backend runs
        _check_shape(args, len(task.target_dictionary))
        places = parse_places(args.fast_weight_attention)
        names = _decoder_mixers(args)
        if set(names) != {"softmax"} and safe_getattr(args, "cross_self_attention", False):
            raise InvalidInput(
                f"cross_self_attention is set and fast_weight_attention is {args.fast_weight_attention!r}; it must be "
                "without 'decoder', and mixers must not be set: a mixer holds what the decoder has read, not the source"
            )
        kept = safe_getattr(args, "decoder_layers_to_keep", None)
        if kept and len(set(names)) > 1:
            raise InvalidInput(
                f"decoder_layers_to_keep is {kept!r} and mixers is {args.mixers!r}; one of them must go: layers are "
                "kept of decoders whose layers are alike"
            )
        # As the task has it, and not the model: a checkpoint is read with the command's task.
        aligns = safe_getattr(args, "criterion", None) == "label_smoothed_cross_entropy_with_alignment"
        if "cross" in places and aligns and getattr(getattr(task, "cfg", None), "load_alignments", False):
            raise _no_alignments("load_alignments", True)
        model: FastWeightTransformerModel = super().build_model(args, task)
        if args.compile:
            compile_layers(model)
            model.decoder.tells_of_graphs = not args.no_cuda_graphs
        return model

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Dictionary, embed_tokens: nn.Module) -> Any:
        cfg = TransformerConfig.from_namespace(args)
        build = _source_mixer(args, "encoder", cfg.encoder.attention_heads)
        return FastWeightTransformerEncoder(cfg, src_dict, embed_tokens, *build)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Dictionary, embed_tokens: nn.Module) -> Any:
        cfg = TransformerConfig.from_namespace(args)
        heads = cfg.decoder.attention_heads
        settings, names = mixer_settings(cfg, heads), _decoder_mixers(cfg)
        check_heads(args, [name for name in names if name != "softmax"])
        mixers = [
            # fairseq's own: it has weights to align words by.
            (name, None if name == "softmax" else partial(build_mixer, name, settings=settings))
            for name in names
        ]
        cross = _source_mixer(args, "cross", heads, source_dim=cfg.encoder.embed_dim)
        return FastWeightTransformerDecoder(cfg, tgt_dict, embed_tokens, mixers, cross)

    @classmethod
    def complete(cls, args: Any) -> tuple[Any, list[tuple[str, dict[str, Kind]]]]:
        """Completes a command's options by defaults, and returns them with all attentions' mixers and their kinds."""
        for side in ("encoder", "decoder"):
            kept, layers = getattr(args, f"{side}_layers_to_keep", None) or [], getattr(args, f"{side}_layers")
            if len(set(kept)) < len(kept) or not all(0 <= number < layers for number in kept):
                raise InvalidInput(
                    f"{side}_layers_to_keep is {kept}; it must be comma-separated numbers from 0 to {layers - 1}, "
                    "each once"
                )
        places = parse_places(args.fast_weight_attention)
        sources = [("sum", SOURCE_MIXERS) if place in places else _SOFTMAX for place in ("encoder", "cross")]
        return args, [*sources, *(_SOFTMAX if name == "softmax" else (name, MIXERS) for name in _decoder_mixers(args))]

    def set_beam_size(self, beam_size: int) -> None:
        """Tells the mixers that read the source how many hypotheses there may be for each."""
        for module in self.decoder.modules():
            if isinstance(module, Mixer):
                module.beam_size = beam_size

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Prepares for generation.

        Raises:
            ValueError: for options out of their range, or that need an alignment, which fast weights cannot give.
        """
        check_inference(cfg)
        if "cross" in parse_places(self.args.fast_weight_attention):
            for option in ("print_alignment", "replace_unk"):
                value = getattr(cfg.generation, option, None)
                if value not in (None, False):
                    raise _no_alignments(option, value)
        super().prepare_for_inference_(cfg)


def _check_shape(args: Any, types: int) -> None:
    """Checks that the sizes fit each other."""
    shared = args.share_decoder_input_output_embed or args.share_all_embeddings
    if shared and not args.adaptive_softmax_cutoff and args.decoder_output_dim != args.decoder_embed_dim:
        raise InvalidInput(
            f"decoder_output_dim is {args.decoder_output_dim}; with shared embeddings it must be decoder_embed_dim, "
            f"{args.decoder_embed_dim}"
        )
    if args.adaptive_softmax_cutoff:
        read_cutoffs("adaptive_softmax_cutoff", args.adaptive_softmax_cutoff, types)
    for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        # fairseq's parser makes a list of it, of which its models expect to be text.
        if kept := safe_getattr(args, name, None):
            setattr(args, name, kept if isinstance(kept, str) else ",".join(map(str, kept)))


def _decoder_mixers(args: Any) -> tuple[str, ...]:
    """The names of the mixers of the decoder's layers."""
    softmax = "" if args.mixers or "decoder" in parse_places(args.fast_weight_attention) else "all"
    return layer_mixers(args, softmax, FastWeightTransformerOptions.update_rule)


def _source_mixer(args: Any, place: str, heads: int, **others: Any) -> tuple[str, MixerBuilder | None]:
    """The name of the mixer that reads a source at `place`, and its builder; None for softmax attention."""
    if place not in parse_places(args.fast_weight_attention):
        return "softmax", None
    check_heads(args, ["sum"], SOURCE_MIXERS, "encoder" if place == "encoder" else "decoder")
    settings = {**mixer_settings(TransformerConfig.from_namespace(args), heads), **others}
    return "sum", partial(build_mixer, "sum", settings=settings, kinds=SOURCE_MIXERS)


def _no_alignments(option: str, value: object) -> InvalidInput:
    """The error for an option that needs an alignment, if the attention to the source is linear attention."""
    return InvalidInput(
        f"{option} is {value!r}; it must be left out, as the attention from decoder to encoder is a fast weight "
        "memory, which has no weights to align words by (--fast-weight-attention encoder,decoder trains a model that "
        "can)"
    )


def parse_places(text: str) -> frozenset[str]:
    """Reads --fast-weight-attention: comma-separated `PLACES`, or "none".

    Raises:
        ValueError: for anything else.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["none"]:
        return frozenset()
    if not words or not set(words) <= set(PLACES):
        raise InvalidInput(
            f"fast_weight_attention is {text!r}; it must be none, or a comma-separated list of {', '.join(PLACES)}"
        )
    return frozenset(words)


_register = partial(register_architecture, FastWeightTransformerOptions, FairseqDataclass, "fast_weight_transformer")

_register("", "fairseq's `transformer`: 6 + 6 layers, 512 wide, 8 heads.", base_architecture)
_register("wmt_en_de_base", "Vaswani et al. 2017, base.", base_architecture)
_register(
    "wmt_en_de_big",
    "Schlag et al. 2021, App. E: Vaswani et al.'s big model, 6 + 6 layers, 1024 wide, 16 heads.",
    transformer_vaswani_wmt_en_de_big,
)
_register(
    "iwslt_de_en",
    "fairseq's `transformer_iwslt_de_en`: 6 + 6 layers, 512 wide, 4 heads, for some hundred thousand sentences.",
    transformer_iwslt_de_en,
)
_register(
    "multi30k_en_de",
    '4 + 4 layers, 128 wide, 4 heads, for Multi30k\'s 29,000 sentences (Wu et al. 2021, "tiny").',
    base_architecture,
    encoder_embed_dim=128,
    encoder_ffn_embed_dim=256,
    encoder_layers=4,
    encoder_attention_heads=4,
    decoder_layers=4,
    decoder_attention_heads=4,
    dropout=0.3,
)
_register("tiny", "fairseq's `transformer_tiny`, for tests: 2 + 2 layers, 64 wide, 2 heads.", tiny_architecture)
