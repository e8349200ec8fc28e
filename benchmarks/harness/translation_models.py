"""Translation models as fairseq's command lines build them, without a corpus."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask

import fairseq_fastweights.models.fast_weight_transformer  # noqa: F401


def build_translation_model(arch: str, flags: list[str], words: int, seed: int = 0) -> tuple[Any, Dictionary]:
    """A model with random weights, made ready for generation as `fairseq-generate` does, and its dictionary.

    Args:
        arch: a named architecture, fairseq's or our own.
        flags: what `fairseq-train` would be given.
        words: size of the dictionary, which source and target share, without the special symbols.
    """
    dictionary = Dictionary()
    for i in range(words):
        dictionary.add_symbol(f"w{i}")
    args = options.parse_args_and_arch(
        options.get_training_parser("translation"), ["no data", "--task", "translation", "--arch", arch, *flags]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fairseq's ways with hydra
        config = convert_namespace_to_omegaconf(args)
    torch.manual_seed(seed)
    model = TranslationTask(config.task, dictionary, dictionary).build_model(config.model)
    model = model.eval().requires_grad_(False)
    model.prepare_for_inference_(config)
    return model, dictionary
