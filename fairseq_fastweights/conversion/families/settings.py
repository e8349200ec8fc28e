"""The settings that a config.json may have, and readers of single ones, whose errors name the setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairseq_fastweights.invalid_input import InvalidInput, check_number

_MOST, MOST_LAYERS = 10**8, 10_000  # memory is used for each layer before weights are read

_OF_GENERATION = frozenset(
    """max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams
    use_mtp use_cache cache_implementation cache_config max_cache_len temperature top_k top_p min_p top_h typical_p
    epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    token_healing guidance_scale watermarking_config num_return_sequences output_scores output_logits
    return_dict_in_generate is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit
    assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type compile_config disable_compile
    continuous_batching_config low_memory penalty_alpha dola_layers diversity_penalty num_beam_groups constraints
    force_words_ids prefill_chunk_size""".split()
)
_OF_FILES = frozenset(
    """model_type architectures transformers_version dtype torch_dtype _name_or_path name_or_path _commit_hash auto_map
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix tokenizer_class
    output_attentions output_hidden_states return_dict chunk_size_feed_forward torchscript use_bfloat16
    tf_legacy_loss is_decoder bos_token_id pad_token_id sep_token_id decoder_start_token_id initializer_range
    gradient_checkpointing output_past xla_device neftune_noise_alpha unsloth_fixed unsloth_version
    transformers.js_config _attn_implementation attn_implementation _attn_implementation_autoset
    _experts_implementation experts_implementation""".split()
)
UNUSED = _OF_GENERATION | _OF_FILES
"""Settings of all kinds of models that leave the outputs as they are: those of generation, of files, of tasks."""
_ONLY: dict[str, Any] = {
    **{"quantization_config": None, "per_layer_config": None, "pruned_heads": {}, "is_encoder_decoder": False},
    **{"add_cross_attention": False, "cross_attention_hidden_size": None, "tie_encoder_decoder": False},
}
"""Settings of all kinds of models that would change them, with the one value that is supported."""
_ROTARY = ("rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")
"""Settings that `rotary` checks, where they are used."""


class Nullable(NamedTuple):
    """The default of a positive whole number that may be null."""

    default: int | None = None


@dataclass(frozen=True)
class Settings:
    """The settings that a config.json of a kind, or an object in one, may have: any other is refused.

    Args:
        defaults: those that are read, with the values that their class takes for missing ones; given ones must be of
            the same kind.
        only: the one supported value of others that would change the model. Their class takes it for missing ones too,
            unless `defaults` has another.
        unused: those that change nothing.
        renamed: second names of settings.
    """

    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=dict)
    unused: Iterable[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def complete(self, given: Mapping[str, Any], kind: str, place: str = "config.json") -> dict[str, Any]:
        """All settings that are read.

        Args:
            given: the settings in the file.
            kind: of the model, for messages.
            place: of the settings, for messages.
        """
        for name, value in given.items():
            if not any(name in names for names in (self.defaults, self.only, self.unused, self.renamed)):
                known = ", ".join(sorted({*self.defaults, *self.only}))
                raise InvalidInput(
                    f"{place}: {name} is {value!r:.200}; it must not be there, as {kind} has no such setting that is "
                    f"known here; there may be {known}"
                )
        values = {**self.only, **self.defaults, **{self.renamed.get(name, name): x for name, x in given.items()}}
        for name, default in self.defaults.items():
            values[name] = _checked(name, values[name], default, place)
        for name, supported in self.only.items():
            if values[name] != supported:
                missing = "" if name in given else " where it is missing"
                raise InvalidInput(
                    f"{place}: {name} is {values[name]!r:.200}{missing}; only {supported!r} is supported"
                )
        return values


def of_class(defaults: Mapping[str, Any], only: Mapping[str, Any] = {}, unused: str = "", **renamed: str) -> Settings:
    """The settings of a class of models, with those that all classes have; `unused` holds names between spaces."""
    return Settings(defaults, {**_ONLY, **only}, UNUSED | set(unused.split()), renamed)


def number(config: Mapping[str, Any], name: str, most: int = _MOST) -> int:
    """Reads a positive whole number."""
    value = config[name]
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be a positive whole number")
    if value > most:
        raise InvalidInput(f"config.json: {name} is {value}; it must be at most {most}")
    return value


def _checked(name: str, value: Any, default: Any, place: str) -> Any:
    """A setting, after a check that it is of the kind of its default; positive unless it is a probability."""
    if isinstance(default, Nullable):
        value = default.default if value is default else value
        return None if value is None else number({name: value}, name)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidInput(f"{place}: {name} is {value!r}; it must be true or false")
    elif isinstance(default, int):
        return number({name: value}, name, MOST_LAYERS if name in ("num_hidden_layers", "n_layer") else _MOST)
    elif isinstance(default, float) and name not in _ROTARY:
        limits: dict[str, Any] = {"least": 0, "below": 1} if "drop" in name else {"above": 0}
        check_number(f"{place}: {name}", value, **limits)
        return float(value)
    return value


def mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Reads settings within a setting; {} if there are none."""
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidInput(f"config.json: {name} is {value!r:.200}; it must be an object")
    return value or {}


def positive(config: Mapping[str, Any], name: str) -> float:
    """Reads a positive number."""
    check_number(f"config.json: {name}", config[name], above=0)
    return float(config[name])


def check_heads(width_name: str, width: int, name: str, heads: int) -> None:
    """Checks that `heads` divides `width`."""
    if width % heads:
        raise InvalidInput(f"config.json: {name} is {heads}; it must be a divisor of {width_name}, {width}")


def activation(config: Mapping[str, Any], name: str) -> str:
    """Reads an activation function; returns fairseq's name of it."""
    tanh = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # three ways to write the same formula
    known = {"gelu": "gelu", "relu": "relu", **dict.fromkeys(tanh, "gelu_accurate")}
    value = config[name]
    if not isinstance(value, str) or value not in known:
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be one of {', '.join(known)}")
    return known[value]


def layer_kinds(config: Mapping[str, Any], layers: int, default: list[str], allowed: Iterable[str]) -> list[str]:
    """Reads layer_types, the kind of each layer; null stands for `default`."""
    kinds = config["layer_types"]
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in [*allowed] for kind in kinds):
        raise InvalidInput(
            f"config.json: layer_types is {kinds!r:.200}; it must hold one of {', '.join(allowed)} for each of "
            f"{layers} layers"
        )
    return kinds


class Rotary(NamedTuple):
    """Rotary embeddings."""

    dim: int
    """How many dimensions of a head are rotated."""
    base: float
    """Of the frequencies."""
    kind: str
    """Of their scaling; "default" for none."""
    numbers: tuple[float, ...]
    """Of the scaling."""


def rotary(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    base: str = "rope_theta",
    fraction: str = "partial_rotary_factor",
    scalings: Mapping[str, tuple[str, ...]] = {},
    unused: Iterable[str] = (),
) -> Rotary:
    """Reads rotary embeddings as transformers does, which takes rope_scaling of older files before rope_parameters.

    Args:
        config: all settings.
        head_dim: size of the heads.
        base, fraction: names of the settings for those that are missing there.
        scalings: the kinds of scaling, with the names of their numbers.
        unused: settings there that change nothing.
    """
    name = "rope_scaling" if mapping(config, "rope_scaling") else "rope_parameters"
    given = mapping(config, name)
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ("default", *scalings):
        raise InvalidInput(f"config.json: rope_type is {kind!r}; it must be one of {', '.join(['default', *scalings])}")
    numbers = scalings.get(kind, ())
    defaults = {"rope_type": kind, "type": kind, "rope_theta": config[base], "partial_rotary_factor": config[fraction]}
    if defaults["partial_rotary_factor"] is None:
        defaults["partial_rotary_factor"] = 1.0
    defaults |= {number: float(config["max_position_embeddings"]) if "max" in number else None for number in numbers}
    values = Settings(defaults, unused=unused).complete(given, f"rope_type {kind}", f"config.json: in {name}")
    place = fraction if "partial_rotary_factor" not in given else "partial_rotary_factor"
    part = values["partial_rotary_factor"]
    check_number(f"config.json: {place}", part, above=0, most=1)
    dim = int(head_dim * part)
    if dim % 2:
        raise InvalidInput(
            f"config.json: {place} is {part} and head_dim {head_dim}; their product must be even: rotary embeddings "
            "rotate pairs"
        )
    theta = base if "rope_theta" not in given else "rope_theta"
    return Rotary(
        dim,
        positive({theta: values["rope_theta"]}, theta),
        kind,
        tuple(positive(values, number) for number in numbers),
    )


def read_end_of_text(config: Mapping[str, Any], vocabulary: int, otherwise: int | None) -> int:
    """Reads the id of the token that ends a text."""
    value = config["eos_token_id"]
    if isinstance(value, list) and value:  # models for dialogue have several: the first ends a text
        value = value[0]
    if value is None:
        value = otherwise
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise InvalidInput(
            f"config.json: eos_token_id is {value!r}; it must be one number, from 0 to vocab_size - 1, {vocabulary - 1}"
        )
    return value
