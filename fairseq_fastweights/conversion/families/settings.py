"""The settings that a config.json may have: any other is refused, by an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The kinds of scaling of rotary embeddings, and their numbers in the order of `parse_scaling`."""

_MOST, _MOST_LAYERS = 10**8, 10_000  # memory is used for each layer before weights are read

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


class Layers(int):
    """The default of a number of layers."""


class Probability(float):
    """The default of a probability."""


class Unchecked(float):
    """The default of a number that is checked where it is used."""


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
        # From the weakest to the strongest: one supported value, the class's own, the file's.
        values = {**self.only, **self.defaults, **{self.renamed.get(name, name): x for name, x in given.items()}}
        for name, default in self.defaults.items():
            values[name] = checked(name, values[name], default, place)
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


def checked(name: str, value: Any, default: Any, place: str = "config.json") -> Any:
    """A setting, after a check that it is of the kind of its default; numbers are positive."""
    if isinstance(default, Nullable):
        value = default.default if value is default else value
        return None if value is None else checked(name, value, 1, place)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidInput(f"{place}: {name} is {value!r}; it must be true or false")
    elif isinstance(default, int):
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{place}: {name} is {value!r}; it must be a positive whole number")
        if value > (most := _MOST_LAYERS if isinstance(default, Layers) else _MOST):
            raise InvalidInput(f"{place}: {name} is {value}; it must be at most {most}")
        return int(value)
    elif isinstance(default, float) and not isinstance(default, Unchecked):
        limits: dict[str, Any] = {"least": 0, "below": 1} if isinstance(default, Probability) else {"above": 0}
        check_number(f"{place}: {name}", value, **limits)
        return float(value)
    return value


def mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Reads settings within a setting; {} if there are none."""
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidInput(f"config.json: {name} is {value!r:.200}; it must be an object")
    return value or {}


def rotary_options(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    base: str = "rope_theta",
    fraction: str = "partial_rotary_factor",
    scalings: Mapping[str, tuple[str, ...]] = SCALINGS,
    partial: bool = False,
    unused: Iterable[str] = (),
) -> dict[str, Any]:
    """Reads rotary embeddings as transformers does, which takes rope_scaling of older files before rope_parameters.

    Args:
        config: all settings.
        head_dim: size of the heads.
        base, fraction: names of the settings that hold for those that are missing there.
        scalings: the kinds of scaling, with the names of their numbers.
        partial: whether they may rotate a part of each head.
        unused: settings there that change nothing.
    """
    place = "rope_scaling" if mapping(config, "rope_scaling") else "rope_parameters"
    given = mapping(config, place)
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ("default", *scalings):
        raise InvalidInput(f"config.json: rope_type is {kind!r}; it must be one of {', '.join(['default', *scalings])}")
    numbers = scalings.get(kind, ())
    known = dict.fromkeys(("rope_type", "type", "rope_theta", "partial_rotary_factor", *numbers))
    Settings(known, unused=unused).complete(given, f"rope_type {kind}", f"config.json: in {place}")
    name = "rope_theta" if "rope_theta" in given else base
    theta = checked(name, given.get(name, config.get(name)), 1.0)
    name = "partial_rotary_factor" if "partial_rotary_factor" in given else fraction
    part = given[name] if name in given else 1.0 if config[fraction] is None else config[fraction]
    check_number(f"config.json: {name}", part, above=0, most=1)
    # Rounded down, as transformers does.
    dim = int(head_dim * part)
    if dim % 2:
        raise InvalidInput(
            f"config.json: {name} is {part} and head_dim {head_dim}; their product must be even: rotary embeddings "
            "rotate pairs"
        )
    if dim != head_dim and not partial:
        raise InvalidInput(
            f"config.json: partial_rotary_factor leaves {dim} of {head_dim} dimensions a head; only 1.0 is supported"
        )
    options: dict[str, Any] = {"rotary-dim": dim, "rotary-base": theta}
    if kind != "default":
        positions = {"original_max_position_embeddings": config["max_position_embeddings"]}
        scaling = [checked(number, (positions | given).get(number), 1.0) for number in numbers]
        # The shortest text that is read as the same number.
        texts = (f"{x:g}" if float(f"{x:g}") == x else repr(x) for x in scaling)
        options["rotary-scaling"] = f"{kind}:{','.join(texts)}"
        try:
            parse_scaling(options["rotary-scaling"])
        except ValueError as error:
            raise InvalidInput(f"config.json: {str(error).replace('rotary_scaling', 'rope_parameters', 1)}") from None
    return options
