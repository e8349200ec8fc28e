"""Checks of fairseq's options before data are read and a model is made.

fairseq checks few of them: wrong values of the others end late, in an unrelated error, or train a useless model.
"""

from __future__ import annotations

import ast
import math
import re
from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    FairseqLanguageModel,
    register_model_architecture,
)
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf

from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.mixers.registry import MIXERS, check_read
from fairseq_fastweights.models import cuda_graphs
from fairseq_fastweights.models.description import OPTIONS_OF_MIXERS, shared_settings
from fairseq_fastweights.models.fast_weight_options import (
    FastWeightLanguageModelOptions,
    FastWeightOptions,
    set_defaults,
)

RANGES: dict[str, tuple[float, float]] = {
    # Sizes and counts.
    **dict.fromkeys(
        """decoder_layers decoder_embed_dim decoder_input_dim decoder_output_dim decoder_ffn_embed_dim
        decoder_attention_heads encoder_layers encoder_embed_dim encoder_ffn_embed_dim encoder_attention_heads
        max_source_positions max_target_positions character_embedding_dim quant_noise_pq_block_size
        adaptive_input_factor adaptive_softmax_factor batch_size batch_size_valid max_tokens max_tokens_valid
        update_freq log_interval save_interval validate_interval
        required_batch_size_multiple required_seq_len_multiple distributed_world_size num_shards
        beam nbest iter_decode_with_beam softmax_batch""".split(),
        (1, math.inf),
    ),
    # Those that may be nothing.
    **dict.fromkeys(
        """base_layers lr max_update max_epoch warmup_updates
        weight_decay adam_eps save_interval_updates num_workers data_buffer_size shard_id context_window max_len_a
        max_len_b min_len prefix_size no_repeat_ngram_size buffer_size iter_decode_max_iter text_streams""".split(),
        (0, math.inf),
    ),
    # Probabilities and parts.
    **dict.fromkeys(
        """dropout attention_dropout activation_dropout relu_dropout adaptive_softmax_dropout decoder_layerdrop
        encoder_layerdrop quant_noise_pq quant_noise_scalar label_smoothing ema_decay
        reset_state_probability""".split(),
        (0, 1),
    ),
    "seed": (0, 2**32 - 1),
    # Of generation; -1 is fairseq's for one that is not used.
    **dict.fromkeys(("lenpen", "lm_weight", "diverse_beam_strength"), (-math.inf, math.inf)),
    **dict.fromkeys(("sampling_topk", "diversity_rate"), (-1, math.inf)),
    "sampling_topp": (-1, 1),
    "temperature": (0, math.inf),
    **{
        own.name: (own.metadata["least"], math.inf)
        for own in fields(FastWeightLanguageModelOptions)
        if own.metadata.get("least") is not None
    },
}
"""The smallest and the largest value of options: fairseq's here, this package's where they are declared."""

_OWN = {own.name for own in fields(FastWeightOptions)} - {"_name"}

NEEDS: dict[str, tuple[str, ...]] = {
    "no_cuda_graphs": ("compile",),
    **dict.fromkeys(("adaptive_input_factor", "adaptive_input_cutoff"), ("adaptive_input",)),
    **dict.fromkeys(
        ("adaptive_softmax_factor", "adaptive_softmax_dropout", "adaptive_softmax_bias"), ("adaptive_softmax_cutoff",)
    ),
    "tie_adaptive_proj": ("tie_adaptive_weights",),
    "square_projections": ("adaptive_input", "adaptive_softmax_cutoff"),
    **dict.fromkeys(
        ("character_filters", "character_embedding_dim", "char_embedder_highway_layers"), ("character_embeddings",)
    ),
    "quant_noise_pq_block_size": ("quant_noise_pq",),
    "no_decoder_final_norm": ("decoder_normalize_before",),
    **dict.fromkeys(("base_sublayers", "base_shuffle"), ("base_layers",)),
}
"""Options of a model that are read where one of other options is set: those of its parts beside the mixers."""

REPLACED_BY: dict[str, tuple[str, ...]] = {
    "activation_fn": ("swiglu",),
    "share_decoder_input_output_embed": ("adaptive_softmax_cutoff",),
    "decoder_learned_pos": ("no_token_positional_embeddings",),
    "encoder_learned_pos": ("no_token_positional_embeddings",),
    "adaptive_input": ("character_embeddings",),
}
"""Options of a model that nothing reads where one of other options is set."""


def check_ranges(options: Any) -> None:
    """Raises a `ValueError` for a number among `options` that is not finite, or outside its range in `RANGES`."""
    values = OmegaConf.to_container(options) if OmegaConf.is_config(options) else getattr(options, "__dict__", {})
    for name, value in values.items():
        for number in value if _is_list(value) else [value]:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                check_number(name, number, *RANGES.get(name, ()))


def check_inference(cfg: Any) -> None:
    """Raises a `ValueError` for options of evaluation and generation that are out of their ranges."""
    for group in ("dataset", "generation", "interactive", "eval_lm"):
        check_ranges(getattr(cfg, group, None))
    if cfg.dataset.shard_id >= cfg.dataset.num_shards:
        raise InvalidInput(
            f"shard_id is {cfg.dataset.shard_id}; it must be less than num_shards, {cfg.dataset.num_shards}"
        )
    generation = cfg.generation
    if generation.nbest > generation.beam:
        raise InvalidInput(f"nbest is {generation.nbest}; it must be at most beam, {generation.beam}")
    if not generation.max_len_a and generation.min_len > generation.max_len_b:
        raise InvalidInput(f"min_len is {generation.min_len}; it must be at most max_len_b, {generation.max_len_b}")


def check_is_language_model(args: Any) -> None:
    """Raises a `ValueError` for a model, such as one in a checkpoint, that is no language model."""
    name = getattr(args, "_name", None) or getattr(args, "arch", None)
    model = ARCH_MODEL_REGISTRY.get(name)
    if model is not None and not issubclass(model, FairseqLanguageModel):
        raise InvalidInput(f"task is fast_weight_language_modeling; for a model of arch {name} it must be another")


def check_positions(model: Any, task: Any) -> None:
    """Raises a `ValueError` if the model has fewer positions than the task's segments."""
    segments_are_full = getattr(task.sample_break_mode, "value", task.sample_break_mode) in ("none", None)
    if segments_are_full and model.max_positions() < task.tokens_per_sample:
        raise InvalidInput(
            f"max_target_positions is {model.max_positions()}; it must be at least tokens_per_sample, "
            f"{task.tokens_per_sample}"
        )


def check_criterion(criterion: Any, adaptive: bool) -> None:
    """Raises a `ValueError` for a criterion that does not fit the model's softmax."""
    name = getattr(criterion, "_name", None) or getattr(criterion, "criterion", None)
    if adaptive and name in ("cross_entropy", "label_smoothed_cross_entropy"):
        raise InvalidInput(f"criterion is {name}; with adaptive_softmax_cutoff it must be adaptive_loss")
    if name == "adaptive_loss" and not adaptive:
        raise InvalidInput("criterion is adaptive_loss; it needs adaptive_softmax_cutoff, which is not set")


def register_architecture(
    options: type[FairseqDataclass],
    inherited: type[FairseqDataclass],
    model: str,
    name: str,
    document: str,
    base: Callable[[Any], None],
    **settings: Any,
) -> None:
    """Registers an architecture with fairseq: one of fairseq's with values for options that were not given.

    The command's options are checked after it has set its own.

    Args:
        options: those of the model, whose defaults are set too, but for the `inherited` ones.
        inherited: options that fairseq sets.
        model, name: the architecture is called MODEL_NAME, or MODEL without a name.
        document: its docstring.
        base: fairseq's function of the architecture that it changes.
        settings: the values.
    """

    def architecture(args: Any) -> None:
        for option, value in settings.items():
            if safe_getattr(args, option, None) is None:  # max_target_positions is there, of the task, as None
                setattr(args, option, value)
        set_defaults(args, options, inherited)
        pre_norm = safe_getattr(args, "decoder_normalize_before", None)
        base(args)
        if "decoder_normalize_before" in settings:  # which fairseq's base always sets
            args.decoder_normalize_before = pre_norm

    architecture.__doc__ = document
    register_model_architecture(model, f"{model}_{name}" if name else model)(_checked(architecture))


def check_model_itself(model: str) -> None:
    """Adds the checks for --arch MODEL, for which fairseq calls no function of an architecture."""
    ARCH_CONFIG_REGISTRY[model] = _checked(ARCH_CONFIG_REGISTRY[model])


def _checked(architecture: Callable[[Any], None]) -> Callable[[Any], None]:
    def configure(args: Any) -> None:
        given = frozenset(vars(args))  # an option of the model has no value yet unless it was given
        architecture(args)
        if hasattr(args, "arch") and getattr(args, "_name", None) is None:  # a command's, and no checkpoint's
            check_ranges(args)
            _check_task(args)
            _check_training(args)
            cuda_graphs.check_options(args)
            cuda_graphs.check_gpu(args)
            if not given >= _OWN:  # or they are complete
                check_unread(args, ARCH_MODEL_REGISTRY[args.arch], given)

    configure.__doc__ = architecture.__doc__
    return configure


def _check_task(args: Any) -> None:
    """Checks that the task fits the model; fairseq-train's default is translation."""
    task, ours = args.task, "fast_weight_language_modeling"
    reads_texts = "tokens_per_sample" in getattr(TASK_DATACLASS_REGISTRY.get(task), "__dataclass_fields__", ())
    if args.arch.startswith("fast_weight_lm") and not reads_texts:
        raise InvalidInput(f"task is {task}; with arch {args.arch} it must be {ours}, or language_modeling")
    if args.arch.startswith("fast_weight_transformer") and task in (ours, "language_modeling"):
        raise InvalidInput(
            f"task is {task}; with arch {args.arch} it must be translation, or another that has a source"
        )


def _check_training(args: Any) -> None:
    """Checks options of fairseq-train that fairseq does not check."""
    betas = getattr(args, "adam_betas", None)
    if isinstance(betas, str) and not _are_betas(betas):
        raise InvalidInput(
            f"adam_betas is {betas!r}; it must be two numbers, at least 0 and less than 1, as '(0.9, 0.98)'"
        )
    updates = getattr(args, "total_num_update", None)  # not set, it is a reference to max_update
    if isinstance(updates, str) and re.fullmatch(r"[-+]?0*(\.0*)?|-.*", updates):
        raise InvalidInput(f"total_num_update is {updates}; it must be positive")
    most, length = args.max_tokens, getattr(args, "tokens_per_sample", 0)
    if most is not None and most < length and args.sample_break_mode == "none":
        raise InvalidInput(f"max_tokens is {most}; it must be at least tokens_per_sample, {length}")
    restored = Path(getattr(args, "restore_file", None) or "")
    # Without it fairseq begins anew; a run's own may be missing, as at its beginning.
    if len(restored.parts) > 1 and restored.parent != Path(args.save_dir) and not restored.exists():
        raise InvalidInput(f"restore_file is {str(restored)!r}, and there is no such file")


def check_unread(args: Any, model: Any, given: Collection[str]) -> None:
    """Raises a `ValueError` for an option among those that were given that no part of the model reads."""
    options, layers = model.complete(args)
    if getattr(options, "transfer_from", None) or getattr(options, "finetune_from_model", None):
        layers = [*layers, ("softmax", MIXERS)]  # of the source, whose shape the options say too
    for option in given:
        for others, needs in ((NEEDS.get(option, ()), True), (REPLACED_BY.get(option, ()), False)):
            there = [other for other in others if getattr(options, other, None)]
            if not others or bool(there) == needs:
                continue
            names = " or ".join(others)
            why = f"it needs {names}, which is not set" if needs else f"with {there[0]} it has no effect"
            value = getattr(options, option)
            raise InvalidInput(f"{option} is {'set' if value is True else value}; {why}")
    rule = str(getattr(options.update_rule, "value", options.update_rule))
    if "update_rule" in given and (rule, MIXERS) not in layers:
        raise InvalidInput(f"update_rule is {rule!r}; it needs a layer of {rule}, and mixers has none")
    typed = {OPTIONS_OF_MIXERS[name]: (name, getattr(options, name)) for name in given if name in OPTIONS_OF_MIXERS}
    check_read(typed, shared_settings(options), layers)


def check_architecture(args: Any) -> None:
    """Checks that the settings of a named architecture are in a model's configuration for training.

    The released fairseq-hydra-train overwrites them by the defaults of the model, and would train another model. The
    switches show it: no command line can turn off a switch that an architecture turns on. With the patched
    fairseq-hydra-train, which applies architectures, a configuration file may turn a switch off.

    Raises:
        ValueError: if the settings were overwritten.
    """
    name = getattr(args, "_name", None)
    model = ARCH_MODEL_NAME_REGISTRY.get(name)
    if model == name or model not in MODEL_DATACLASS_REGISTRY:
        return
    architecture = Namespace()
    ARCH_CONFIG_REGISTRY[name](architecture)
    made = OmegaConf.create({"model": {"_name": name}})
    add_defaults(made)
    switches = [option for option, value in vars(architecture).items() if value is True]
    lost = [option for option in switches if not getattr(args, option, True) and not made.model[option]]
    if lost:
        raise InvalidInput(
            f"model._name is {name!r}, whose settings this fairseq's fairseq-hydra-train leaves out ({lost[0]} is "
            f"False); it must be {model!r}, with all settings written out, or --arch of fairseq-train, unless fairseq "
            "is the one that tools/build_fairseq.py --force installs"
        )


def check_unread_settings(cfg: Any) -> None:
    """The same for a whole configuration, as of fairseq-hydra-train, in which options differ from the preset."""
    name = getattr(cfg, "_name", None)
    model = ARCH_MODEL_REGISTRY.get(name)
    if ARCH_MODEL_NAME_REGISTRY.get(name) != "fast_weight_lm" or not OmegaConf.is_config(cfg):
        return
    preset, options = Namespace(), Namespace(**OmegaConf.to_container(cfg))
    ARCH_CONFIG_REGISTRY[name](preset)
    set_defaults(preset, MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[name]], FairseqDataclass)
    names = {*OPTIONS_OF_MIXERS, *NEEDS, *REPLACED_BY} & vars(options).keys()
    options.transfer_from = True  # it may be so: this configuration does not say it
    check_unread(options, model, {x for x in names if getattr(options, x) != getattr(preset, x, None)})


def read_cutoffs(name: str, text: str | None, types: int) -> list[int]:
    """Reads comma-separated cut-offs between clusters of tokens."""
    words = [] if text is None else [word.strip() for word in str(text).strip("[]").split(",")]
    if not words or not all(word.isdecimal() for word in words):
        raise InvalidInput(f"{name} is {text!r}; it must be comma-separated token ids")
    cutoffs = [int(word) for word in words]
    if cutoffs != sorted(set(cutoffs)) or cutoffs[0] < 1 or cutoffs[-1] > types:
        raise InvalidInput(
            f"{name} is {text!r}; its numbers must rise, from 1 at least to the dictionary's {types} entries at most"
        )
    return cutoffs


def _are_betas(text: str) -> bool:
    try:
        betas = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return _is_list(betas) and len(betas) == 2 and all(isinstance(x, (int, float)) and 0 <= x < 1 for x in betas)


def _is_list(value: Any) -> bool:
    return not isinstance(value, (str, type(None))) and hasattr(value, "__iter__")
