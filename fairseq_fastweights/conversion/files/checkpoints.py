"""Checkpoints of fairseq: read without running code from them, and written as before the first update."""

from __future__ import annotations

import copy
import warnings
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import options as fairseq_options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_fastweights.conversion.files.weight_files import load_safely
from fairseq_fastweights.files.digests import with_digests
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads a checkpoint of fairseq, or raises a `ValueError`; it may hold tensors and plain values alone."""
    state = load_safely(checkpoint)
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not all(isinstance(weight, Tensor) for weight in model.values()):
        raise InvalidInput(f"{checkpoint}: this is not a checkpoint of fairseq's")
    return state


def options_in(state: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The options of the model or the task, as `group` says, in a checkpoint; an older one has a Namespace of all."""
    options = state.get("args")
    if options is None:
        options = (state.get("cfg") or {}).get(group)
    if OmegaConf.is_config(options):
        options = OmegaConf.to_container(options, resolve=False)
    return dict(vars(options) if isinstance(options, Namespace) else options or {})


def configuration(settings: Mapping[str, Any]) -> Any:
    """The configuration that fairseq-train makes of options of `fast_weight_lm`, by name without dashes; no ${...}."""
    for name, value in settings.items():
        # OmegaConf would resolve it, and could read environment variables.
        if "${" in str(value):
            raise InvalidInput(f"{name} is {value!r}; it must be a literal, without ${{...}}")
    cfg = copy.deepcopy(_defaults())
    for name, value in settings.items():
        option = name.replace("-", "_")
        # Some options, as tokens_per_sample, are of the task, some of the model, some of both.
        groups = [group for group in (cfg.model, cfg.task) if option in group]
        assert groups, option
        for group in groups:
            group[option] = value
    return cfg


def build_on_meta(cfg: Any, dictionary: Dictionary) -> FastWeightLanguageModel:
    """The `fast_weight_lm` of a configuration and a dictionary, without numbers (device meta)."""
    task: Any = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with torch.device("meta"):
        return FastWeightLanguageModel.build_model(cfg.model, task)


@cache
def _defaults() -> Any:
    """The configuration without options; fairseq takes a second for it."""
    parser = fairseq_options.get_training_parser("language_modeling")
    args = fairseq_options.parse_args_and_arch(parser, [".", "--arch", "fast_weight_lm"])
    with warnings.catch_warnings():  # fairseq calls hydra in old ways that still work
        warnings.simplefilter("ignore", UserWarning)
        return convert_namespace_to_omegaconf(args)


def write_checkpoint(path: Path, cfg: Any, model: Mapping[str, Tensor], settings: Tensor) -> None:
    """Writes a checkpoint as fairseq 0.12 does before the first update, or raises an `OSError`.

    Args:
        path: the file.
        cfg: the configuration.
        model: the weights and buffers, but for those of the decoder's version and of its settings.
        settings: as `checkpoint_settings` encodes them.
    """
    # fairseq's trainer reads these when a training goes on from the file.
    history = {
        "criterion_name": "CrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": {**model, "decoder.version": torch.tensor([3.0]), f"decoder.{checkpoint_settings.NAME}": settings},
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
