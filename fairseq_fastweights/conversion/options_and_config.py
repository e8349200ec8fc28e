"""Translates fairseq's options and names for a language model into those of `FastWeightConfig`'s model, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairseq.data import Dictionary
from fairseq.utils import safe_getattr

from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.registry import MIXERS, option_name, write_pattern
from fairseq_fastweights.models.fast_weight_options import mixer_settings, parse_layers

_SAME = {
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
    "adaptive_input_factor": "adaptive_input_factor",
    "adaptive_softmax_factor": "adaptive_softmax_factor",
    "adaptive_softmax_dropout": "adaptive_softmax_dropout",
    "adaptive_softmax_bias": "adaptive_softmax_bias",
    "square_projections": "square_projections",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "layerdrop": "decoder_layerdrop",
    "initializer_range": "init_std",
}
"""Settings that differ from options only in their names."""

_FLOATS = ("adaptive_input_factor", "adaptive_softmax_factor", "adaptive_softmax_dropout", "layerdrop")

_PREFIXES = {"decoder.output_projection.": "lm_head.", "decoder.adaptive_softmax.": "lm_head.", "decoder.": "model."}
"""The beginnings of parameters' names, in fairseq and in `fairseq_fastweights.huggingface`."""

_WITHOUT_COUNTERPART = {
    "character_embeddings": (False, None),
    "quant_noise_pq": (0, None),
    "base_layers": (0, None),
    "decoder_xformers_att_config": (None,),
}
"""Options without a setting in `FastWeightConfig`, with the values at which they have no effect."""


def config_of(args: Any, mixers: Sequence[str], dictionary: Dictionary, *, final_norm: bool) -> FastWeightConfig:
    """The configuration of a model that was built with these options.

    Args:
        args: the model's options.
        mixers: the names of its layers' mixers.
        dictionary: its dictionary.
        final_norm: whether there is a layer norm after the last layer.

    Raises:
        ValueError: if an option has no counterpart; the message names it.
    """
    for name, nothing in _WITHOUT_COUNTERPART.items():
        value = safe_getattr(args, name, None)
        if value not in nothing:
            raise InvalidInput(f"{name} is {value!r}; models with it have no counterpart among those of transformers")
    settings: dict[str, Any] = {}
    for own, option in _SAME.items():
        value = safe_getattr(args, option, None)
        if value is not None:
            settings[own] = float(value) if own in _FLOATS else getattr(value, "value", value)
    learned = bool(safe_getattr(args, "decoder_learned_pos", False))
    if safe_getattr(args, "no_token_positional_embeddings", False):
        settings["position_embeddings"] = "none"
    else:
        settings["position_embeddings"] = "learned" if learned else "sinusoidal"
    adaptive_input = bool(safe_getattr(args, "adaptive_input", False))
    softmax_cutoffs = _cutoffs(safe_getattr(args, "adaptive_softmax_cutoff", None))
    tied = "share_decoder_input_output_embed" if softmax_cutoffs is None else "tie_adaptive_weights"
    if softmax_cutoffs is None and adaptive_input and safe_getattr(args, tied, False):
        raise InvalidInput(f"{tied} is set with adaptive_input; embeddings in bands are not an output layer")
    masked = safe_getattr(args, "mask_special_symbols", False)
    activation_dropout = safe_getattr(args, "activation_dropout", 0) or safe_getattr(args, "relu_dropout", 0) or 0
    return FastWeightConfig(
        **settings,
        vocab_size=len(dictionary),
        mixers=list(mixers),
        output_norm_layers=sorted(parse_layers(safe_getattr(args, "output_norm_layers", ""), len(mixers))),
        mixer_settings=_settings_of(args, mixers),
        final_norm=final_norm,
        scale_embeddings=not safe_getattr(args, "no_scale_embedding", False),
        adaptive_input_cutoffs=_cutoffs(args.adaptive_input_cutoff) if adaptive_input else None,
        adaptive_softmax_cutoffs=softmax_cutoffs,
        tie_word_embeddings=bool(safe_getattr(args, tied, False)),
        tie_adaptive_projections=bool(
            softmax_cutoffs is not None
            and safe_getattr(args, tied, False)
            and safe_getattr(args, "tie_adaptive_proj", False)
        ),
        masked_tokens=[dictionary.bos(), dictionary.pad(), dictionary.unk()] if masked else [],
        activation_dropout=float(activation_dropout),
        pad_token_id=dictionary.pad(),
        bos_token_id=dictionary.bos() if safe_getattr(args, "add_bos_token", False) else dictionary.eos(),
        eos_token_id=dictionary.eos(),
    )


def options_of(config: FastWeightConfig) -> dict[str, Any]:
    """The options of `fast_weight_lm`, without dashes, that build a model of this configuration; True for flags."""
    options: dict[str, Any] = {option: getattr(config, own) for own, option in _SAME.items()}
    assert isinstance(config.mixers, list) and config.mixer_settings is not None
    if config.position_embeddings == "none":
        options["no_token_positional_embeddings"] = True
    elif config.position_embeddings == "learned":
        options["decoder_learned_pos"] = True
    if config.adaptive_input_cutoffs is not None:
        options["adaptive_input"] = True
        options["adaptive_input_cutoff"] = ",".join(map(str, config.adaptive_input_cutoffs))
    tied = "share_decoder_input_output_embed"
    if config.adaptive_softmax_cutoffs is not None:
        tied = "tie_adaptive_weights"
        options["adaptive_softmax_cutoff"] = ",".join(map(str, config.adaptive_softmax_cutoffs))
    options[tied] = config.tie_word_embeddings
    options |= {
        "no_decoder_final_norm": not config.final_norm,
        "no_scale_embedding": not config.scale_embeddings,
        "add_bos_token": config.bos_token_id != config.eos_token_id,
        "tie_adaptive_proj": config.tie_adaptive_projections,
        "mask_special_symbols": bool(config.masked_tokens),
        "activation_dropout": config.activation_dropout,
        "tokens_per_sample": config.max_position_embeddings,
        "mixers": write_pattern(config.mixers),
        "output_norm_layers": ",".join(map(str, config.output_norm_layers or ())),
    }
    for name, value in config.mixer_settings.items():
        if name == "bias":
            options["no_attention_bias"] = not value
        elif name == "backend":
            options["fast_weight_backend"] = value
        elif name == "normalization":
            options[name] = "auto" if value is None else ",".join(value) or "none"
        elif value is not None:
            options[name] = value
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _settings_of(args: Any, mixers: Sequence[str]) -> dict[str, Any]:
    """The `FastWeightConfig.mixer_settings` of a model that was built with these options."""
    if not hasattr(args, "normalization"):  # fairseq's own Transformer
        return {}
    every = mixer_settings(args, args.decoder_attention_heads)
    taken: set[str] = set()
    for mixer in mixers:
        kind = MIXERS[mixer]
        taken |= {*kind.shared, *(option_name(mixer, option) for option in kind.options)}
        taken |= set() if kind.heads is None else {kind.heads}
    taken -= {"num_heads", "dropout", "max_positions", "zero_centered_norms"}
    settings = {name: every[name] for name in sorted(taken)}
    if settings.get("normalization") is not None:
        settings["normalization"] = sorted(settings["normalization"])
    return settings


def _cutoffs(text: Any) -> list[int] | None:
    return None if text is None else [int(word) for word in str(text).strip("[]").split(",")]


def new_name(name: str) -> str:
    """The name of one of fairseq's parameters in `fairseq_fastweights.huggingface`."""
    old = next(old for old in _PREFIXES if name.startswith(old))
    return _PREFIXES[old] + name.removeprefix(old)
