"""The description of a model: options of `fast_weight_lm` and settings of `FastWeightConfig`, each made of the other.

A user types the options, `--help` explains them, and each checkpoint holds all of them. All else is made of them: a
config.json by `config_of`, the mixers' settings by `mixer_settings`, the settings in a checkpoint's tensor by
`checkpoint_settings.settings_of`; and published models are read as options (`families.family.Family`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import not_
from typing import TYPE_CHECKING, Any

from fairseq.data import Dictionary
from fairseq.utils import safe_getattr

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import check_divisor
from fairseq_fastweights.mixers.registry import (
    MIXERS,
    SHARED_DEFAULTS,
    Kind,
    have_sizes,
    lookup,
    option_name,
    parse_pattern,
    settings_read,
    write_pattern,
)
from fairseq_fastweights.mixers.update_rules import parse_normalization, write_normalization
from fairseq_fastweights.ops.backends import BACKENDS

if TYPE_CHECKING:
    from fairseq_fastweights.huggingface.configuration import FastWeightConfig

MEMORIES = [name for name, kind in MIXERS.items() if "scale_read_out" in kind.shared]
"""The choices of --update-rule: linear attention with a rule of `UPDATE_RULES`, or retention."""


def same(value: Any) -> Any:
    """The value itself; of a choice its name."""
    return getattr(value, "value", value)


def _numbers(text: Any) -> list[int]:
    return [int(word) for word in str(text).strip("[]").split(",")]


def _text(numbers: Sequence[int] | None) -> str | None:
    return None if numbers is None else ",".join(map(str, numbers))


def _backend(name: Any) -> str:
    lookup("fast_weight_backend", str(name), dict.fromkeys(BACKENDS))
    return str(name)


_Change = Callable[[Any], Any]
SHARED_OPTIONS: dict[str, tuple[str, Any, _Change, _Change]] = {
    **{name: (name, default, same, same) for name, default in SHARED_DEFAULTS.items()},
    "bias": ("no_attention_bias", False, not_, not_),
    "backend": ("fast_weight_backend", "auto", _backend, same),
    "feature_map": (
        "feature_map",
        "auto",
        lambda text: None if text == "auto" else str(text),
        lambda name: "auto" if name is None else name,
    ),
    "normalization": (
        "normalization",
        "auto",
        parse_normalization,
        lambda names: "auto" if names is None else write_normalization(names),
    ),
}
"""The settings of several kinds of mixers, by the names that `build_mixer` takes.

Each has its option, the value where a model lacks the option, and how the setting is read from it and written to it.
"""

_OWN_OPTIONS = [option_name(mixer, option) for mixer, kind in MIXERS.items() for option in kind.options]

OPTIONS_OF_MIXERS: dict[str, str] = {
    "attention_dropout": "dropout",
    **dict.fromkeys(("decoder_xformers_att_config", "encoder_xformers_att_config"), "xformers_att_config"),
    "fast_weight_heads": "fast_weight_heads",
    **{option: setting for setting, (option, *_) in SHARED_OPTIONS.items()},
    **{name: name for name in _OWN_OPTIONS},
}
"""The options that mixers alone read, and the names of their settings for `build_mixer`.

The number of attention's heads is not among them: it is part of the decoder's shape, which any mixer may be given.
"""


def shared_settings(args: Any) -> dict[str, Any]:
    """Returns the settings of several kinds of mixers from a model's options."""
    return {name: read(getattr(args, option, default)) for name, (option, default, read, _) in SHARED_OPTIONS.items()}


def mixer_settings(args: Any, heads: int) -> dict[str, Any]:
    """Returns the settings for `build_mixer` from a model's options; `heads` is the number of heads of attention.

    Raises:
        ValueError: for an unknown normalisation.
    """
    return {
        **{name: getattr(args, name) for name in _OWN_OPTIONS},
        **shared_settings(args),
        "num_heads": heads,
        "fast_weight_heads": getattr(args, "fast_weight_heads", None) or heads,
        "dropout": args.attention_dropout,
        "zero_centered_norms": getattr(args, "zero_centered_norms", False),
        "max_positions": args.max_target_positions,
    }


def check_heads(args: Any, mixers: Sequence[str], kinds: Mapping[str, Kind] = MIXERS, side: str = "decoder") -> None:
    """Checks that the heads of these mixers, on a side of the model, divide the width or have sizes of their own.

    Raises:
        ValueError: if not; the message names the option.
    """
    settings = {name: getattr(args, name, None) for name in ("fast_weight_heads", "head_dim", *_OWN_OPTIONS)}
    width, attention_heads = (getattr(args, f"{side}_{name}") for name in ("embed_dim", "attention_heads"))
    heads, sized = settings["fast_weight_heads"], have_sizes(mixers, settings.get)
    if heads is not None and (heads < 1 or not sized):
        check_divisor("fast_weight_heads", heads, f"{side}_embed_dim", width)
    for name in mixers:
        kind = kinds[name]
        of_attention = kind.heads == "num_heads" or (kind.heads is not None and heads is None and not sized)
        if of_attention and not ("head_dim" in kind.shared and settings["head_dim"]):
            check_divisor(f"{side}_attention_heads", attention_heads, f"{side}_embed_dim", width)


def parse_layers(text: str, layers: int, name: str = "softmax_attention_layers") -> frozenset[int]:
    """Reads layers, as of --softmax-attention-layers: "all", or comma-separated numbers from 1; empty for none.

    Raises:
        ValueError: for anything else, or a number above `layers`.
    """
    if text.strip() == "all":
        return frozenset(range(1, layers + 1))
    numbers = [word.strip() for word in text.split(",") if word.strip()]
    if not all(n.isdecimal() and 1 <= int(n) <= layers for n in numbers):
        raise InvalidInput(f"{name} is {text!r}; it must be 'all' or comma-separated numbers from 1 to {layers}")
    return frozenset(int(n) for n in numbers)


def layer_mixers(args: Any, softmax_layers: str | None = None, default_rule: str = "delta") -> tuple[str, ...]:
    """Reads the names of the mixers of a decoder's layers: --mixers, or the pattern that the short forms stand for.

    Args:
        args: options of a model, before any layer is left out.
        softmax_layers: those that keep softmax attention, as `parse_layers` reads them; None for the option's value.
        default_rule: the default of --update-rule.

    Raises:
        ValueError: for a pattern that cannot be read, or that contradicts other options.
    """
    rule, layers = str(args.update_rule), args.decoder_layers
    softmax = parse_layers(args.softmax_attention_layers if softmax_layers is None else softmax_layers, layers)
    # The short forms stand for a pattern: a rule in all layers but those of softmax.
    if not args.mixers:
        lookup("update_rule", rule, {name: MIXERS[name] for name in MEMORIES})
        return parse_pattern(f"{rule},softmax:{','.join(map(str, softmax))}" if softmax else rule, layers)
    names = parse_pattern(args.mixers, layers)
    if softmax:
        raise InvalidInput(
            f"mixers is {args.mixers!r}, and softmax_attention_layers is set too; it must be left out: mixers says "
            "which layers have softmax"
        )
    if rule != default_rule and rule not in names:
        raise InvalidInput(
            f"update_rule is {rule!r}, which mixers, {args.mixers!r}, has in no layer; one of them must go"
        )
    return names


_TABLE: dict[str, tuple[str, _Change, _Change]] = {
    **{
        setting: (option, same, same)
        for setting, option in {
            "hidden_size": "decoder_embed_dim",
            "input_size": "decoder_input_dim",
            "output_size": "decoder_output_dim",
            "intermediate_size": "decoder_ffn_embed_dim",
            "num_hidden_layers": "decoder_layers",
            "num_attention_heads": "decoder_attention_heads",
            "max_position_embeddings": "max_target_positions",
            "hidden_act": "activation_fn",
            "pre_norm": "decoder_normalize_before",
            "parallel_residual": "parallel_residual",
            "rms_norm_eps": "rms_norm_eps",
            "zero_centered_norms": "zero_centered_norms",
            "swiglu": "swiglu",
            "embedding_norm": "layernorm_embedding",
            "adaptive_softmax_bias": "adaptive_softmax_bias",
            "square_projections": "square_projections",
            "dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "initializer_range": "init_std",
        }.items()
    },
    **{
        setting: (option, float, same)
        for setting, option in {
            "adaptive_input_factor": "adaptive_input_factor",
            "adaptive_softmax_factor": "adaptive_softmax_factor",
            "adaptive_softmax_dropout": "adaptive_softmax_dropout",
            "activation_dropout": "activation_dropout",
            "layerdrop": "decoder_layerdrop",
        }.items()
    },
    "final_norm": ("no_decoder_final_norm", not_, not_),
    "scale_embeddings": ("no_scale_embedding", not_, not_),
    "adaptive_input_cutoffs": ("adaptive_input_cutoff", _numbers, _text),
    "adaptive_softmax_cutoffs": ("adaptive_softmax_cutoff", _numbers, _text),
}
"""By setting, the option that says the same, and how either is made from the other's value."""

_WITHOUT_COUNTERPART = {
    "character_embeddings": (False, None),
    "quant_noise_pq": (0, None),
    "base_layers": (0, None),
    "decoder_xformers_att_config": (None,),
}
"""Options without a setting in `FastWeightConfig`, with the values at which they have no effect."""

_PREFIXES = {"decoder.output_projection.": "lm_head.", "decoder.adaptive_softmax.": "lm_head.", "decoder.": "model."}
"""The beginnings of parameters' names, in fairseq and in `fairseq_fastweights.huggingface`."""


def config_of(options: Any, dictionary: Dictionary) -> FastWeightConfig:
    """The configuration of the model that is built with all these options, of `fast_weight_lm` or `transformer_lm`.

    Raises:
        ValueError: if an option has no counterpart; the message names it.
    """
    # fairseq, which imports all modules of this folder, does without transformers.
    from fairseq_fastweights.huggingface.configuration import FastWeightConfig

    def value_of(option: str) -> Any:
        return safe_getattr(options, option, None)

    for name, nothing in _WITHOUT_COUNTERPART.items():
        if value_of(name) not in nothing:
            raise InvalidInput(
                f"{name} is {value_of(name)!r}; models with it have no counterpart among those of transformers"
            )
    settings = {
        setting: read(value_of(option)) for setting, (option, read, _) in _TABLE.items() if value_of(option) is not None
    }
    # fairseq ties an adaptive softmax by one option, and a single output matrix by another.
    clusters = settings.get("adaptive_softmax_cutoffs") is not None
    tied_by = "tie_adaptive_weights" if clusters else "share_decoder_input_output_embed"
    tied = bool(value_of(tied_by))
    if not value_of("adaptive_input"):
        settings["adaptive_input_cutoffs"] = None
    elif tied and not clusters:
        raise InvalidInput(f"{tied_by} is set with adaptive_input; embeddings in clusters are not an output layer")
    if value_of("no_token_positional_embeddings"):
        positions = "none"
    else:
        positions = "learned" if value_of("decoder_learned_pos") else "sinusoidal"
    ours = value_of("mixers") is not None  # fairseq's own Transformer has no such option
    mixers = layer_mixers(options) if ours else ("softmax",) * options.decoder_layers
    masked = value_of("mask_special_symbols")
    settings |= {
        "vocab_size": len(dictionary),
        "mixers": list(mixers),
        "mixer_settings": _settings_of(options, mixers) if ours else {},
        "output_norm_layers": sorted(parse_layers(value_of("output_norm_layers") or "", len(mixers))),
        "position_embeddings": positions,
        "final_norm": settings.get("pre_norm", False) and settings.get("final_norm", True),
        "tie_word_embeddings": tied,
        "tie_adaptive_projections": clusters and tied and bool(value_of("tie_adaptive_proj")),
        "activation_dropout": settings.get("activation_dropout") or float(value_of("relu_dropout") or 0),
        "masked_tokens": [dictionary.bos(), dictionary.pad(), dictionary.unk()] if masked else [],
        "pad_token_id": dictionary.pad(),
        "bos_token_id": dictionary.bos() if value_of("add_bos_token") else dictionary.eos(),
        "eos_token_id": dictionary.eos(),
    }
    return FastWeightConfig(**settings)


def options_of(config: FastWeightConfig) -> dict[str, Any]:
    """The options of `fast_weight_lm`, without dashes, that build a model of this configuration; True for flags."""
    assert isinstance(config.mixers, list) and config.mixer_settings is not None
    clusters = config.adaptive_softmax_cutoffs is not None
    options = {option: write(getattr(config, setting)) for setting, (option, _, write) in _TABLE.items()}
    options |= {
        "mixers": write_pattern(config.mixers),
        "output_norm_layers": _text(config.output_norm_layers),
        "no_token_positional_embeddings": config.position_embeddings == "none",
        "decoder_learned_pos": config.position_embeddings == "learned",
        "adaptive_input": config.adaptive_input_cutoffs is not None,
        "tie_adaptive_weights" if clusters else "share_decoder_input_output_embed": config.tie_word_embeddings,
        "tie_adaptive_proj": config.tie_adaptive_projections,
        "mask_special_symbols": bool(config.masked_tokens),
        "add_bos_token": config.bos_token_id != config.eos_token_id,
        "tokens_per_sample": config.max_position_embeddings,
    }
    for name, value in config.mixer_settings.items():
        option, _, _, write = SHARED_OPTIONS.get(name, (name, None, same, same))
        options[option] = write(value)
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _settings_of(options: Any, mixers: Sequence[str]) -> dict[str, Any]:
    """The `FastWeightConfig.mixer_settings` of a model that was built with these options."""
    every = mixer_settings(options, options.decoder_attention_heads)
    taken = {name for mixer in mixers for name in settings_read(mixer, every)}
    taken -= {"num_heads", "dropout", "max_positions", "zero_centered_norms"}
    settings = {name: every[name] for name in sorted(taken)}
    if settings.get("normalization") is not None:
        settings["normalization"] = sorted(settings["normalization"])
    return settings


def new_name(name: str) -> str:
    """The name of one of fairseq's parameters in `fairseq_fastweights.huggingface`."""
    old = next(old for old in _PREFIXES if name.startswith(old))
    return _PREFIXES[old] + name.removeprefix(old)
