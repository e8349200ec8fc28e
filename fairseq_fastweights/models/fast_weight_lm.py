"""The language model `fast_weight_lm`, and its named architectures."""

from __future__ import annotations

import ast
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
    transformer_lm_baevski_wiki103,
)
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from fairseq.utils import safe_getattr

from fairseq_fastweights.adaptive_softmax import (
    SQUARE_PROJECTIONS,
    add_biases,
    leave_out_square_projections,
    start_as_identity,
)
from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.layers import draw_normal
from fairseq_fastweights.mixers.registry import MIXERS, Kind, lookup
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling
from fairseq_fastweights.models import checkpoint_settings, cuda_graphs
from fairseq_fastweights.models.description import check_heads, layer_mixers, parse_layers
from fairseq_fastweights.models.fast_weight_decoder import FastWeightDecoder
from fairseq_fastweights.models.fast_weight_options import FastWeightLanguageModelOptions, add_group, set_defaults
from fairseq_fastweights.models.mixer_layers import compile_layers
from fairseq_fastweights.models.option_checks import (
    check_inference,
    check_model_itself,
    check_ranges,
    read_cutoffs,
    register_architecture,
)
from fairseq_fastweights.ops.backends import say_again


@dataclass
class FastWeightLanguageModelConfig(TransformerLanguageModelConfig, FastWeightLanguageModelOptions):
    """Options of `fast_weight_lm`: those of fairseq's `transformer_lm` and of linear attention."""


@register_model("fast_weight_lm", dataclass=FastWeightLanguageModelConfig)
class FastWeightLanguageModel(TransformerLanguageModel):
    """fairseq's Transformer language model with mixers in place of self-attention.

    Only the mixers differ: all options of fairseq's `transformer_lm` keep their meaning, and parameters keep their
    names.
    """

    @classmethod
    def build_model(cls, args: Any, task: Any) -> FastWeightLanguageModel:
        """Builds the model for a task's dictionaries.

        Raises:
            ValueError: for options that contradict each other, before anything is built.
        """
        check_ranges(args)
        cuda_graphs.check_options(args)
        say_again()  # which backend runs
        # The names of all layers, before LayerDrop's pruning leaves some out.
        names = layer_mixers(args)
        if args.decoder_layers_to_keep:
            kept = _parse_kept_layers(args.decoder_layers_to_keep, args.decoder_layers)
            names = tuple(names[number - 1] for number in kept)
            behind = parse_layers(args.output_norm_layers, args.decoder_layers, "output_norm_layers")
            args.output_norm_layers = ",".join(str(i) for i, number in enumerate(kept, 1) if number in behind)
            # From here on the options are those of the model that is left.
            args.decoder_layers = len(kept)
            if args.mixers:
                args.mixers = ",".join(f"{name}:{number}" for number, name in enumerate(names, 1))
            else:
                args.softmax_attention_layers = ",".join(str(i) for i, name in enumerate(names, 1) if name == "softmax")
        if args.adaptive_softmax_cutoff is not None:
            read_cutoffs("adaptive_softmax_cutoff", args.adaptive_softmax_cutoff, len(task.target_dictionary))
            if args.mask_special_symbols:
                raise InvalidInput(
                    f"mask_special_symbols is set and adaptive_softmax_cutoff is {args.adaptive_softmax_cutoff!r}; "
                    "an adaptive softmax has no logits to mask: one of them must go"
                )
        check_heads(args, names)
        _check_shape(args)
        if "softmax" in names and safe_getattr(args, "decoder_xformers_att_config", None):
            raise InvalidInput(
                f"decoder_xformers_att_config is {args.decoder_xformers_att_config!r}; with layers of softmax "
                "attention it must not be set: they are computed by PyTorch"
            )
        # fairseq's default: a model reads texts as long as the task's segments.
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample
        embeddings = build_embeddings(args, task.source_dictionary)
        decoder = FastWeightDecoder(args, task.target_dictionary, embeddings, mixers=names)
        if args.init_std is not None:
            for module in decoder.modules():
                draw_normal(module, args.init_std)
            # Gates and decays whose initial values are part of the published layer.
            for mixer in decoder.mixers:
                mixer.reset_special_parameters()
        adaptive = isinstance(decoder.embed_tokens, AdaptiveInput)
        change_clusters(args, decoder.embed_tokens if adaptive else None, decoder.adaptive_softmax)
        if args.compile:
            compile_layers(decoder)
        if cuda_graphs.are_wanted(args):
            decoder.record_layers(args)
        return cls(decoder)

    @classmethod
    def add_groups(cls, parser: ArgumentParser) -> None:
        """Adds its own options to a parser, as a group; fairseq adds the others."""
        add_group(parser, "fast weight memories and other mixers", FastWeightLanguageModelOptions())

    @classmethod
    def complete(cls, args: Any) -> tuple[Any, list[tuple[str, dict[str, Kind]]]]:
        """Completes a command's options by defaults, and returns them with the layers' mixers and their kinds."""
        options = Namespace(**vars(args))
        set_defaults(options, FastWeightLanguageModelConfig, FairseqDataclass)
        return options, [(name, MIXERS) for name in layer_mixers(options)]

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Checks the command's options, and prepares the model for evaluation or generation."""
        check_inference(cfg)
        super().prepare_for_inference_(cfg)

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """Loads weights as fairseq does; with --decoder-layers-to-keep, the checkpoint's settings are pruned too."""
        text = getattr(model_cfg, "decoder_layers_to_keep", None)
        if text:
            state_dict = dict(state_dict)  # as fairseq, which leaves the layers in it as they are
            checkpoint_settings.prune(state_dict, "decoder", sorted(int(number) + 1 for number in text.split(",")))
        return super().load_state_dict(state_dict, strict, model_cfg, args)


def _check_shape(args: Any) -> None:
    """Checks that the sizes fit each other, and that options of Llama- and Qwen-shaped models do."""
    if args.init_std is not None:
        check_number("init_std", args.init_std, above=0)
    check_number("rotary_base", args.rotary_base, above=0)
    parse_scaling(args.rotary_scaling)
    # An adaptive softmax has weights of its own.
    if args.share_decoder_input_output_embed and args.adaptive_softmax_cutoff is None:
        if args.character_embeddings or args.adaptive_input:
            other = "character_embeddings" if args.character_embeddings else "adaptive_input"
            raise InvalidInput(f"share_decoder_input_output_embed is set; with {other} it must not be")
        if args.decoder_input_dim != args.decoder_output_dim:
            raise InvalidInput(
                f"decoder_input_dim is {args.decoder_input_dim} and decoder_output_dim {args.decoder_output_dim}; with "
                "share_decoder_input_output_embed they must be the same"
            )
    block = args.quant_noise_pq_block_size
    for name in ("decoder_embed_dim", "decoder_ffn_embed_dim"):
        if args.quant_noise_pq and getattr(args, name) % block:
            raise InvalidInput(f"quant_noise_pq_block_size is {block}; it must divide {name}, {getattr(args, name)}")
    output_norms = parse_layers(args.output_norm_layers, args.decoder_layers, "output_norm_layers")
    chosen = {"parallel_residual": args.parallel_residual, "output_norm_layers": output_norms}
    forms = [option for option, value in chosen.items() if value]
    if len(forms) == 2:
        raise InvalidInput("parallel_residual is set; with output_norm_layers it must not be")
    for form in forms:
        if not args.decoder_normalize_before:
            raise InvalidInput(f"{form} is set; it needs decoder_normalize_before, which is not")
        for name in ("scale_attn", "scale_heads", "scale_fc", "scale_resids"):
            if safe_getattr(args, name, False):
                raise InvalidInput(f"{name} is set; with {form} it must not be")
    if args.zero_centered_norms and args.rms_norm_eps is None and args.query_key_norm_eps is None:
        raise InvalidInput("zero_centered_norms is set; it needs rms_norm_eps or query_key_norm_eps, which are not")
    if args.swiglu and args.quant_noise_pq:
        raise InvalidInput(f"quant_noise_pq is {args.quant_noise_pq}; with swiglu it must be 0")


def _parse_kept_layers(text: str, layers: int) -> list[int]:
    """Reads --decoder-layers-to-keep, whose numbers start at 0, as sorted numbers from 1."""
    words = [word.strip() for word in text.split(",")]
    numbers = sorted(int(word) + 1 for word in words if word.isdecimal())
    if len(set(numbers)) < len(words) or numbers[-1] > layers:
        raise InvalidInput(
            f"decoder_layers_to_keep is {text!r}; it must be comma-separated numbers from 0 to {layers - 1}, each once"
        )
    return numbers


def build_embeddings(args: Any, dictionary: Dictionary) -> Any:
    """Makes the module of input embeddings that fairseq's options choose.

    Raises:
        ValueError: for options that contradict each other.
    """
    _check_clusters(args)
    if args.character_embeddings:
        return CharacterTokenEmbedder(
            dictionary,
            _read_filters(args.character_filters),
            args.character_embedding_dim,
            args.decoder_embed_dim,
            args.char_embedder_highway_layers,
        )
    if args.tie_adaptive_weights:
        _check_tied_clusters(args)
    if not args.adaptive_input:
        return TransformerLanguageModel.build_embedding(args, dictionary, args.decoder_input_dim)
    cutoffs = read_cutoffs("adaptive_input_cutoff", args.adaptive_input_cutoff, len(dictionary))
    if int(args.decoder_input_dim // args.adaptive_input_factor ** len(cutoffs)) < 1:
        raise InvalidInput(
            f"adaptive_input_factor is {args.adaptive_input_factor:g}: with decoder_input_dim {args.decoder_input_dim} "
            f"and {len(cutoffs)} cut-offs the rarest words' embeddings would have no dimension; it must be at most "
            f"{args.decoder_input_dim ** (1 / len(cutoffs)):.3g}"
        )
    return AdaptiveInput(
        len(dictionary),
        dictionary.pad(),
        args.decoder_input_dim,
        args.adaptive_input_factor,
        args.decoder_embed_dim,
        cutoffs,
        args.quant_noise_pq,
        args.quant_noise_pq_block_size,
    )


def change_clusters(args: Any, embeddings: Any, softmax: Any) -> None:
    """Gives an adaptive input and an adaptive softmax, or None, the form that the options choose.

    It is done last: weights that start as the identity must not be drawn again.
    """
    if args.square_projections == "none":
        leave_out_square_projections(embeddings, softmax)
    elif args.square_projections == "identity":
        start_as_identity(embeddings, softmax)
    if args.adaptive_softmax_bias:
        add_biases(softmax)


def _check_clusters(args: Any) -> None:
    lookup("square_projections", args.square_projections, dict.fromkeys(SQUARE_PROJECTIONS))
    adaptive_input = args.adaptive_input and not args.character_embeddings
    if args.square_projections != "keep" and not adaptive_input and args.adaptive_softmax_cutoff is None:
        raise InvalidInput(
            f"square_projections is {args.square_projections}; it needs adaptive_input or adaptive_softmax_cutoff, "
            "which are not set"
        )
    if args.adaptive_softmax_bias and args.adaptive_softmax_cutoff is None:
        raise InvalidInput("adaptive_softmax_bias is set; it needs adaptive_softmax_cutoff, which is not")


def _read_filters(text: str) -> list[Any]:
    """Reads --character-filters, a Python list of pairs."""
    try:
        filters = [(int(width), int(number)) for width, number in ast.literal_eval(text)]
    except (TypeError, ValueError, SyntaxError):
        filters = []
    if not filters or not all(width > 0 and number > 0 for width, number in filters):
        raise InvalidInput(
            f"character_filters is {text!r}; it must be a list of pairs of widths and numbers of filters"
        )
    return filters


def _check_tied_clusters(args: Any) -> None:
    if not args.adaptive_input:
        raise InvalidInput("tie_adaptive_weights is set; it needs adaptive_input, which is not")
    for name, own, other in (
        ("adaptive_softmax_factor", args.adaptive_softmax_factor, args.adaptive_input_factor),
        ("adaptive_softmax_cutoff", args.adaptive_softmax_cutoff, args.adaptive_input_cutoff),
        ("decoder_output_dim", args.decoder_output_dim, args.decoder_input_dim),
    ):
        if own != other:
            raise InvalidInput(f"{name} is {own!r}; with tie_adaptive_weights it must be that of the input, {other!r}")


check_model_itself("fast_weight_lm")


def _register(
    arch: str,
    document: str,
    sizes: tuple[int, int, int],
    base: Callable[[Any], None] = base_lm_architecture,
    **settings: Any,
) -> None:
    """Registers an architecture of these layers, width and heads."""
    layers, width, heads = sizes
    defaults = {"decoder_layers": layers, "decoder_embed_dim": width, "decoder_attention_heads": heads, **settings}
    own, inherited = FastWeightLanguageModelConfig, TransformerLanguageModelConfig
    register_architecture(own, inherited, "fast_weight_lm", arch, document, base, **defaults)


for _size, _width, _segment in (("small", 128, 256), ("medium", 256, 384)):
    # Embeddings of one size for all clusters: a factor of 1.
    _register(
        f"wiki103_{_size}",
        f'Schlag et al. 2021, Sec. 6.3 and App. F, "{_size}": D = {_width}, to be trained on segments of {_segment}.',
        (16, _width, 8),
        decoder_ffn_embed_dim=2048,
        dropout=0.1,
        activation_dropout=0.1,
        attention_dropout=0.0,
        adaptive_input=True,
        adaptive_input_factor=1,
        adaptive_softmax_factor=1,
        adaptive_input_cutoff="20000,40000,200000",
        adaptive_softmax_cutoff="20000,40000,200000",
        tie_adaptive_weights=True,
        tie_adaptive_proj=True,
        no_attention_bias=True,
        scale_read_out=True,
        init_std=0.02,
        decoder_normalize_before=False,
    )

_register(
    "baevski_wiki103",
    "Baevski & Auli 2019, as in fairseq: 16 layers, 1024 wide, 8 heads, adaptive input and softmax.",
    (16, 1024, 8),
    transformer_lm_baevski_wiki103,
)

# With --softmax-attention-layers all these are GPT-2 and Pythia; otherwise their attention is replaced.
for _size, _sizes in {
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (36, 1280, 20),
    "xl": (48, 1600, 25),
}.items():
    _register(
        f"gpt2_{_size}",
        f"Radford et al. 2019, GPT-2 {_size}.",
        _sizes,
        decoder_ffn_embed_dim=4 * _sizes[1],
        decoder_learned_pos=True,
        no_scale_embedding=True,
        share_decoder_input_output_embed=True,
        mask_special_symbols=True,
        activation_fn="gelu_accurate",
        max_target_positions=1024,
        dropout=0.1,
        attention_dropout=0.1,
        init_std=0.02,
    )

_PYTHIA = {"70m": (6, 512, 8), "160m": (12, 768, 12), "410m": (24, 1024, 16), "1b": (16, 2048, 8)}


def _register_pythia(name: str, document: str, size: str, **settings: Any) -> None:
    _, width, heads = _PYTHIA[size]
    _register(
        name,
        document,
        _PYTHIA[size],
        decoder_ffn_embed_dim=4 * width,
        no_token_positional_embeddings=True,
        no_scale_embedding=True,
        rotary_dim=width // heads // 4,
        parallel_residual=True,
        mask_special_symbols=True,
        activation_fn="gelu",
        max_target_positions=2048,
        dropout=0.0,
        attention_dropout=0.0,
        init_std=0.02,
        **settings,
    )


for _size in _PYTHIA:
    _register_pythia(
        f"pythia_{_size}",
        f"Biderman et al. 2023, Pythia {_size}: rotary embedding of a quarter of each head, parallel residual.",
        _size,
    )
# The RetNet and the StripedMamba of Choi 2024 are Pythia with retention, in heads of 256, and with Mamba.
for _size, _pythia, _heads in (("430m", "410m", 4), ("1b", "1b", 8)):
    _register_pythia(
        f"retnet_{_size}",
        f"Choi 2024, Table 1, RetNet {_size}: Pythia {_pythia} with retention in {_heads} heads of 256.",
        _pythia,
        update_rule="retention",
        fast_weight_heads=_heads,
    )
_register_pythia(
    "stripedmamba_430m",
    "Choi 2024, Table 1, StripedMamba 430m: Pythia 410m with Mamba in the place of attention.",
    "410m",
    mixers="mamba",
)
