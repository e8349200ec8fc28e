"""Reads checkpoints of fairseq, and writes them as fairseq 0.12 does before the first update."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

import fairseq_fastweights.models.fast_weight_lm  # noqa: F401  registers the architecture
from fairseq_fastweights.conversion.files.weight_files import load_safely
from fairseq_fastweights.files.digests import with_digests
from fairseq_fastweights.invalid_input import InvalidInput


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads a checkpoint of fairseq, or raises a `ValueError`; it may hold tensors and plain values alone."""
    state = load_safely(checkpoint)
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not all(isinstance(weight, Tensor) for weight in model.values()):
        raise InvalidInput(f"{checkpoint}: this is not a checkpoint of fairseq's")
    return state


def configuration(settings: Mapping[str, Any]) -> Any:
    """The configuration that fairseq-train makes of options of `fast_weight_lm`, by name without dashes; no ${...}."""
    for name, value in settings.items():
        if "${" in str(value):
            raise InvalidInput(f"{name} is {value!r}; it must be a literal, without ${{...}}")
    cfg = copy.deepcopy(_defaults())
    for name, value in settings.items():
        option = name.replace("-", "_")
        groups = [group for group in (cfg.model, cfg.task) if option in group]
        assert groups, option
        for group in groups:
            group[option] = value
    return cfg


@cache
def _defaults() -> Any:
    """The configuration without options; fairseq takes a second for it."""
    parser = options.get_training_parser("language_modeling")
    args = options.parse_args_and_arch(parser, [".", "--arch", "fast_weight_lm"])
    with warnings.catch_warnings():  # fairseq calls hydra in old ways that still work
        warnings.simplefilter("ignore", UserWarning)
        return convert_namespace_to_omegaconf(args)


def write_checkpoint(path: Path, cfg: Any, model: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint with this configuration and these weights and buffers, or raises an `OSError`."""
    history = {
        "criterion_name": "CrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": dict(model),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "task_state": {},
    }
    try:
        with path.open("wb") as file:
            torch.save(with_digests(state), file)
    except (OSError, RuntimeError) as error:  # in the latter torch hides why the file could not be written
        why = error if isinstance(error, OSError) else error.__context__ or error
        raise OSError(f"{path.name}: {why}") from error
