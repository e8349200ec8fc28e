"""Models as fairseq's command lines build them, without a corpus, and their KV caches."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask

import fairseq_fastweights.models.fast_weight_lm
import fairseq_fastweights.models.fast_weight_transformer  # noqa: F401
from fairseq_fastweights.tasks.fast_weight_language_modeling import FastWeightLanguageModelingTask


def build_model(task: str, arch: str, flags: dict[str, object], entries: int) -> tuple[Any, Dictionary]:
    """A model with random weights, made ready for generation as `fairseq-generate` does, and its dictionary.

    `flags` are options of `fairseq-train` beside --share-decoder-input-output-embed; `entries` is the size of the
    vocabulary without the special symbols.
    """
    dictionary = Dictionary()
    for i in range(entries):
        dictionary.add_symbol(f"w{i}")
    given = ["no data", "--task", task, "--arch", arch, "--share-decoder-input-output-embed"]
    given += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    args = options.parse_args_and_arch(options.get_training_parser(task), given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq's use of hydra
        config = convert_namespace_to_omegaconf(args)
    torch.manual_seed(0)
    translation = task == "translation"
    owner, dictionaries = (TranslationTask, 2) if translation else (FastWeightLanguageModelingTask, 1)
    model = owner(config.task, *[dictionary] * dictionaries).build_model(config.model).eval().requires_grad_(False)
    if translation:
        model.prepare_for_inference_(config)
    return model, dictionary


def fill_cache(layers: Iterable[Any], state: dict[str, Any], rows: int, length: int, device: torch.device) -> None:
    """Puts random keys and values of `length` tokens into the KV caches of these layers.

    fairseq's incremental decoding reads one token at a time: to read them all would take minutes.
    """
    for layer in layers:
        attention = layer.self_attn
        shape = (rows, attention.num_heads, length, attention.head_dim)
        cache = {name: torch.randn(shape, device=device) for name in ("prev_key", "prev_value")}
        attention._set_input_buffer(state, {**cache, "prev_key_padding_mask": None})
