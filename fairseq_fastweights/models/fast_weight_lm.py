"""The language model `fast_weight_lm`, and its named architectures."""

# No `from __future__ import annotations` and no `X | None` here: fairseq reads the types of a configuration's fields as
# they stand, and knows `Optional` alone.
# ruff: noqa: UP045

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import register_model
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
    transformer_lm_baevski_wiki103,
)
from fairseq.modules import AdaptiveInput
from fairseq.utils import safe_getattr

from fairseq_fastweights.adaptive_softmax import SQUARE_PROJECTIONS
from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.layers import draw_normal
from fairseq_fastweights.mixers.projections import PROJECTION_BIASES
from fairseq_fastweights.mixers.registry import MIXERS, Kind
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling
from fairseq_fastweights.models import checkpoint_settings, cuda_graphs
from fairseq_fastweights.models.description import check_heads, layer_mixers, parse_layers
from fairseq_fastweights.models.fast_weight_decoder import FastWeightDecoder
from fairseq_fastweights.models.fast_weight_options import FastWeightOptions, add_group, option, set_defaults
from fairseq_fastweights.models.input_embeddings import build_embeddings, change_bands
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
class FastWeightLanguageModelOptions(FastWeightOptions):
    """The options that `fast_weight_lm` adds to those of fairseq's `transformer_lm`."""

    softmax_attention_layers: str = option(
        "",
        "layers that keep softmax attention, short for --mixers with softmax in them: comma-separated "
        "numbers from 1, or all, which makes fairseq's Transformer",
    )
    fast_weight_heads: Optional[int] = option(
        None, "number of heads in layers of linear attention (default: --decoder-attention-heads)"
    )
    no_attention_bias: bool = option(
        False,
        "leave out the biases of the projections in all mixers but softmax; gates that decay a state keep theirs",
    )
    init_std: Optional[float] = option(
        None,
        "standard deviation of the normal distribution that all projections and embeddings are drawn from "
        "(default: fairseq's initial distributions)",
    )
    square_projections: ChoiceEnum(list(SQUARE_PROJECTIONS)) = option(  # type: ignore[valid-type]
        "keep",
        "projections of the adaptive input and softmax that change no size: keep (fairseq's), identity "
        "(they start as the identity) or none (left out, with the dropout after them, as in Transformer-XL's "
        "program)",
    )
    adaptive_softmax_bias: bool = option(False, "give the adaptive softmax a bias for each token and each cluster")
    rotary_dim: int = option(
        0,
        "number of dimensions of each query and key that softmax attention and window-sum rotate by their "
        "positions (rotary position embedding); 0 is none. Linear attention does not need it, and retention always "
        "rotates all dimensions",
    )
    rotary_base: float = option(10000.0, "base of the wavelengths of the rotary position embedding")
    rotary_scaling: str = option(
        "",
        "scaling of the rotary position embedding for texts longer than in training: linear:FACTOR, or "
        "llama3:FACTOR,LOW,HIGH,POSITIONS as in Llama 3",
    )
    kv_heads: int = option(
        0,
        "number of heads of keys and values in softmax and linear attention (grouped-query attention); 0 "
        "is as many as of queries",
    )
    head_dim: int = option(
        0, "dimension of each head in softmax and linear attention; 0 is the width divided by the heads"
    )
    projection_bias: ChoiceEnum(list(PROJECTION_BIASES)) = option(  # type: ignore[valid-type]
        "all",
        "which projections of softmax and linear attention have biases: all, qkv (all but that of the "
        "output, as in Qwen2) or none (Llama); gates keep theirs",
    )
    query_key_norm_eps: Optional[float] = option(
        None,
        "normalise the queries and keys of each head by an RMS norm with this epsilon, as in Qwen3 (default: no norm)",
    )
    rms_norm_eps: Optional[float] = option(
        None, "use RMS norms with this epsilon, as Llama with 1e-5 (default: fairseq's layer norms)"
    )
    zero_centered_norms: bool = option(
        False, "let RMS norms multiply by 1 + w, whose w starts at 0, as in Qwen3-Next and Qwen3.5"
    )
    output_norm_layers: str = option(
        "",
        "layers, comma-separated numbers from 1 or all, that have their norms behind their parts, "
        "x + norm(mixer(x)), as OLMo 2, and not before them",
    )
    swiglu: bool = option(
        False,
        "use SwiGLU feed-forward networks, W2 (silu(Wg x) * W1 x) without biases (Shazeer 2020), as Llama; "
        "--activation-fn is ignored then",
    )
    parallel_residual: bool = option(
        False,
        "let attention and feed-forward network read the same input, each through a layer norm of its own, "
        "as in GPT-NeoX",
    )
    cuda_graphs: bool = option(
        False,
        "in training on a GPU, record the layers as CUDA graphs, and replay these for all batches "
        "of the same shape; other batches are computed as without. Not for all options: the error names those "
        "that cannot be recorded. --compile does it by itself where it can",
    )
    mask_special_symbols: bool = option(
        False,
        "give <s>, <pad> and <unk> probability 0, for vocabularies that came without them; text that "
        "contains <unk> then has infinite perplexity",
    )


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
    def build_model(cls, args: Any, task: Any) -> "FastWeightLanguageModel":
        """Builds the model for a task's dictionaries.

        Raises:
            ValueError: for options that contradict each other, before anything is built.
        """
        check_ranges(args)
        cuda_graphs.check_options(args)
        say_again()  # which backend runs
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
        if args.max_target_positions is None:
            args.max_target_positions = args.tokens_per_sample
        embeddings = build_embeddings(args, task.source_dictionary)
        decoder = FastWeightDecoder(args, task.target_dictionary, embeddings, mixers=names)
        if args.init_std is not None:
            for module in decoder.modules():
                draw_normal(module, args.init_std)
            for mixer in decoder.mixers:
                mixer.reset_special_parameters()
        adaptive = isinstance(decoder.embed_tokens, AdaptiveInput)
        change_bands(args, decoder.embed_tokens if adaptive else None, decoder.adaptive_softmax)
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
        self,
        state_dict: dict[str, Any],
        strict: bool = True,
        model_cfg: Any = None,
        args: Any = None,
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


check_model_itself("fast_weight_lm")


def _register(
    arch: str,
    document: str,
    sizes: tuple[int, int, int],
    base: Callable[[Any], None] = base_lm_architecture,
    **settings: Any,
) -> None:
    """Registers an architecture of these layers, width and heads: one of fairseq's with values for other options."""
    layers, width, heads = sizes
    defaults = {"decoder_layers": layers, "decoder_embed_dim": width, "decoder_attention_heads": heads, **settings}

    def architecture(args: Any) -> None:
        for name, value in defaults.items():
            if safe_getattr(args, name, None) is None:  # max_target_positions is there, of the task, as None
                setattr(args, name, value)
        set_defaults(args, FastWeightLanguageModelConfig, TransformerLanguageModelConfig)
        pre_norm = safe_getattr(args, "decoder_normalize_before", None)
        base(args)
        if "decoder_normalize_before" in settings:  # which fairseq's base always sets
            args.decoder_normalize_before = pre_norm

    architecture.__doc__ = document
    register_architecture("fast_weight_lm", f"fast_weight_lm_{arch}")(architecture)


for _size, _width, _segment in (("small", 128, 256), ("medium", 256, 384)):
    # Embeddings of one size for all bands: a factor of 1.
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
