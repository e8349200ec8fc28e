"""The translation model `fast_weight_transformer`, and its named architectures."""

# No `from __future__ import annotations`: fairseq reads the types of a configuration's fields as they stand.

from argparse import ArgumentParser
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerModel,
    base_architecture,
    transformer_iwslt_de_en,
    transformer_vaswani_wmt_en_de_big,
)
from fairseq.models.transformer.transformer_legacy import tiny_architecture
from fairseq.utils import safe_getattr
from torch import nn

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import MIXERS, SOURCE_MIXERS, Kind, build_mixer
from fairseq_fastweights.models.description import MEMORIES, check_heads, layer_mixers, mixer_settings
from fairseq_fastweights.models.fast_weight_options import (
    WHAT_MEMORIES_DO,
    FastWeightOptions,
    add_group,
    defaults_in_help,
    set_defaults,
)
from fairseq_fastweights.models.fast_weight_transformer_decoder import FastWeightTransformerDecoder
from fairseq_fastweights.models.fast_weight_transformer_encoder import FastWeightTransformerEncoder
from fairseq_fastweights.models.mixer_layers import MixerBuilder, compile_layers
from fairseq_fastweights.models.option_checks import (
    check_inference,
    check_ranges,
    read_cutoffs,
    register_architecture,
)
from fairseq_fastweights.ops.backends import say_again

PLACES = ("encoder", "decoder", "cross")
"""The places of attention in the Transformer: within encoder and decoder, and from decoder to encoder ("cross")."""

_SOFTMAX = ("softmax", {"softmax": Kind(Mixer, ("dropout", "xformers_att_config"))})
"""fairseq's own attention, which reads none of the other settings."""


@defaults_in_help
@dataclass
class FastWeightTransformerOptions(FastWeightOptions):
    """The options that `fast_weight_transformer` adds to those of fairseq's `transformer`."""

    fast_weight_attention: str = field(
        default="encoder,decoder,cross",
        metadata={
            "help": "which attentions are fast weight memories: comma-separated encoder, decoder (self-attention) and "
            "cross (from decoder to encoder), or none; the others are softmax. Encoder and cross always use the sum "
            "rule, as they read a whole source, which has no order to forget or correct in"
        },
    )
    update_rule: ChoiceEnum(MEMORIES) = field(  # type: ignore[valid-type]
        default="sum",
        metadata={"help": f"update rule of the memory in the decoder's self-attention: {WHAT_MEMORIES_DO}"},
    )
    normalization: str = field(
        default="auto",
        metadata={
            "help": "normalisation of the decoder's self-attention: comma-separated sum, attention and removal (delta "
            "rule only), or none; auto is what the rule's paper uses. Encoder and cross always use attention"
        },
    )


@register_model("fast_weight_transformer")
class FastWeightTransformerModel(TransformerModel):
    """fairseq's Transformer for translation with fast weight memories in place of any of its attentions.

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
    """The error for an option that needs an alignment, if the attention to the source is a memory."""
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


@register_architecture("fast_weight_transformer", "fast_weight_transformer")
def fast_weight_transformer(args: Any) -> None:
    """fairseq's `transformer`: 6 + 6 layers, 512 wide, 8 heads."""
    set_defaults(args, FastWeightTransformerOptions, FairseqDataclass)
    base_architecture(args)


@register_architecture("fast_weight_transformer", "fast_weight_transformer_wmt_en_de_base")
def fast_weight_transformer_wmt_en_de_base(args: Any) -> None:
    """Vaswani et al. 2017, base."""
    fast_weight_transformer(args)


@register_architecture("fast_weight_transformer", "fast_weight_transformer_wmt_en_de_big")
def fast_weight_transformer_wmt_en_de_big(args: Any) -> None:
    """Schlag et al. 2021, App. E: Vaswani et al.'s big model, 6 + 6 layers, 1024 wide, 16 heads."""
    set_defaults(args, FastWeightTransformerOptions, FairseqDataclass)
    transformer_vaswani_wmt_en_de_big(args)


@register_architecture("fast_weight_transformer", "fast_weight_transformer_iwslt_de_en")
def fast_weight_transformer_iwslt_de_en(args: Any) -> None:
    """fairseq's `transformer_iwslt_de_en`: 6 + 6 layers, 512 wide, 4 heads, for some hundred thousand sentences."""
    set_defaults(args, FastWeightTransformerOptions, FairseqDataclass)
    transformer_iwslt_de_en(args)


@register_architecture("fast_weight_transformer", "fast_weight_transformer_multi30k_en_de")
def fast_weight_transformer_multi30k_en_de(args: Any) -> None:
    """4 + 4 layers, 128 wide, 4 heads, for Multi30k's 29,000 sentences (Wu et al. 2021, "tiny")."""
    for name, value in {
        "encoder_embed_dim": 128,
        "encoder_ffn_embed_dim": 256,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "decoder_layers": 4,
        "decoder_attention_heads": 4,
        "dropout": 0.3,
    }.items():
        setattr(args, name, safe_getattr(args, name, value))
    fast_weight_transformer(args)


@register_architecture("fast_weight_transformer", "fast_weight_transformer_tiny")
def fast_weight_transformer_tiny(args: Any) -> None:
    """fairseq's `transformer_tiny`, for tests: 2 + 2 layers, 64 wide, 2 heads."""
    set_defaults(args, FastWeightTransformerOptions, FairseqDataclass)
    tiny_architecture(args)
