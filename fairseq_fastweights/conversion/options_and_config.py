"""Translates the options of `fast_weight_lm`, which describe a model here, into `FastWeightConfig` and back.

The options are what a user types and what `--help` explains, and each checkpoint holds all of them. All else is made of
them: a config.json by `config_of`, the settings in a checkpoint's tensor by `checkpoint_settings.settings_of`; and
published models are read as options (`families.family.Family`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import not_
from typing import Any

from fairseq.data import Dictionary
from fairseq.utils import safe_getattr

from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.registry import settings_read, write_pattern
from fairseq_fastweights.models.fast_weight_lm import layer_mixers
from fairseq_fastweights.models.fast_weight_options import SHARED_OPTIONS, mixer_settings, parse_layers, same


def _numbers(text: Any) -> list[int]:
    return [int(word) for word in str(text).strip("[]").split(",")]


def _text(numbers: Sequence[int] | None) -> str | None:
    return None if numbers is None else ",".join(map(str, numbers))


_Change = Callable[[Any], Any]
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
    bands = settings.get("adaptive_softmax_cutoffs") is not None
    tied_by = "tie_adaptive_weights" if bands else "share_decoder_input_output_embed"
    tied = bool(value_of(tied_by))
    if not value_of("adaptive_input"):
        settings["adaptive_input_cutoffs"] = None
    elif tied and not bands:
        raise InvalidInput(f"{tied_by} is set with adaptive_input; embeddings in bands are not an output layer")
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
        "tie_adaptive_projections": bands and tied and bool(value_of("tie_adaptive_proj")),
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
    bands = config.adaptive_softmax_cutoffs is not None
    options = {option: write(getattr(config, setting)) for setting, (option, _, write) in _TABLE.items()}
    options |= {
        "mixers": write_pattern(config.mixers),
        "output_norm_layers": _text(config.output_norm_layers),
        "no_token_positional_embeddings": config.position_embeddings == "none",
        "decoder_learned_pos": config.position_embeddings == "learned",
        "adaptive_input": config.adaptive_input_cutoffs is not None,
        "tie_adaptive_weights" if bands else "share_decoder_input_output_embed": config.tie_word_embeddings,
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
