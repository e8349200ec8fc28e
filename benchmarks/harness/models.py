"""Language models as fairseq's command lines build them, without a corpus."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_fastweights.models.fast_weight_lm
import fairseq_fastweights.tasks.fast_weight_language_modeling  # noqa: F401

TASK = "fast_weight_language_modeling"


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def build_language_model(arch: str, flags: list[str], words: int, seed: int = 0) -> Any:
    """A model with random weights, for generation.

    Args:
        arch: "transformer_lm" (fairseq's) or "fast_weight_lm".
        flags: what `fairseq-train` would be given.
        words: size of the dictionary, without the special symbols.
    """
    with tempfile.TemporaryDirectory() as name:
        dictionary = "".join(f"w{i} {words - i}\n" for i in range(words))
        (Path(name) / "dict.txt").write_text(dictionary)
        args = options.parse_args_and_arch(
            options.get_training_parser(TASK), [name, "--task", TASK, "--arch", arch, *flags]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fairseq's ways with hydra
            config = convert_namespace_to_omegaconf(args)
        with _quiet(logging.getLogger("fairseq")):
            task = tasks.setup_task(config.task)
            torch.manual_seed(seed)
            model = task.build_model(config.model)
    return model.eval().requires_grad_(False)
