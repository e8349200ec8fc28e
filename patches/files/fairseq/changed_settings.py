"""Which settings are others than in the checkpoint that a run goes on from, and which of them do not fit it."""

import copy
import math
import re
from argparse import Namespace
from typing import Any

import torch
from fairseq.invalid_input import InvalidInput
from fairseq.models_of_checkpoints import making_model
from omegaconf import OmegaConf, open_dict

_DATA = ("train_subset", "batch_size", "max_tokens", "required_batch_size_multiple", "grouped_shuffling", "seed")
_SAME_SHAPES = re.compile(
    ".*(attention_heads|activation_fn|normalize_before|no_scale_embedding|positional_embeddings)|(share|tie)_.*"
)
"""Settings that change a model's computation or tie weights, but no weight's name or shape."""

Changes = dict[str, tuple[Any, Any]]
"""By name, the setting of the checkpoint and that of the run."""


def of_data(former: Any, now: Any) -> str:
    """The changed settings on which the samples of an epoch or its batches depend, in words; "" for none."""
    shared = _changes(former, now, "dataset") | _changes(former, now, "common")
    found = _changes(former, now, "task") | {name: shared[name] for name in _DATA if name in shared}
    processes = _changes(former, now, "distributed_training")
    found |= {name: both for name, both in processes.items() if name == "distributed_world_size"}
    return ", ".join(f"{name} was {one} and is {other}" for name, (one, other) in found.items() if name != "data")


def check_computation(path: str, former: Any, now: Any) -> None:
    """Raises an `InvalidInput` for settings with which the weights of a checkpoint mean something else."""
    changes = _changes(former, now, "model")
    if different := {name: both for name, both in changes.items() if _SAME_SHAPES.fullmatch(name)}:
        raise _misfit(path, different)


def check_shapes(path: str, former: Any, now: Any, weights: Any, task: Any) -> None:
    """Raises an `InvalidInput` with the settings that do not fit a checkpoint's weights, where there are some."""
    changes = _changes(former, now, "model")
    wanted = {(name, tuple(x.shape)) for name, x in weights.items()}

    def misfits(name: str | None = None) -> float:
        """How many weights a model lacks, or has too many, with the checkpoint's settings but one."""
        settings = copy.deepcopy(former.model)
        try:
            with open_dict(settings) if OmegaConf.is_config(settings) else torch.no_grad():
                if name is not None:
                    setattr(settings, name, changes[name][1])
            # On the meta device: shapes without memory.
            with making_model(path, settings, weights), torch.device("meta"):
                return len(wanted ^ {(name, tuple(x.shape)) for name, x in _build(settings, task)})
        except Exception:  # settings that make no model
            return math.inf

    # The checkpoint's own settings may misfit, too, as after a change of the dictionary.
    at_first = misfits() if changes else 0
    if different := {name: both for name, both in changes.items() if misfits(name) > at_first}:
        raise _misfit(path, different)


def _build(settings: Any, task: Any) -> Any:
    from fairseq.models import build_model

    return build_model(settings, task).state_dict().items()


def _misfit(path: str, changes: Changes) -> InvalidInput:
    told = [f"{name} is {one!r} in the checkpoint and {other!r} in the model" for name, (one, other) in changes.items()]
    return InvalidInput(f"{path} does not fit the model: {'; '.join(told)}; another model needs another --save-dir")


def _changes(former: Any, now: Any, part: str) -> Changes:
    """The settings of a part that both have and that differ; a checkpoint's interpolations are not resolved."""
    one, other = _plain(getattr(former, part, None), False), _plain(getattr(now, part), True)
    both = [name for name in other if name in one and not name.startswith("_")]
    return {name: (one[name], other[name]) for name in both if str(one[name]) != str(other[name])}


def _plain(settings: Any, resolve: bool) -> dict[str, Any]:
    if OmegaConf.is_config(settings):
        settings = OmegaConf.to_container(settings, resolve=resolve, enum_to_str=True)
    return vars(settings) if isinstance(settings, Namespace) else dict(settings or {})
