"""fairseq's models, as checkpoints, for `to-huggingface`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from fairseq_fastweights.huggingface import FastWeightConfig
from tests.models.conftest import Fairseq, fairseq  # noqa: F401

# Logits of models whose sums are taken in the same order but for a few: float32.
LOGITS = 1e-5


def said(config: FastWeightConfig) -> dict[str, Any]:
    """The settings of a configuration that describe the model, not where it was and in which type."""
    return {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "dtype", "architectures")}


@pytest.fixture(scope="session")
def save(fairseq: Fairseq) -> Any:  # noqa: F811
    """`save(folder, flags, arch)` writes a tiny model and its dictionary, and returns the model."""

    @cache
    def configuration(kind: str) -> dict[str, Any]:
        """The options of fairseq-train where none are given, which takes it a second."""
        cfg = convert_namespace_to_omegaconf(fairseq.tiny(kind))
        return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)

    def write(folder: Path, flags: str = "", arch: str = "fast_weight_lm", **how: Any) -> Any:
        model = fairseq.build(flags, arch=arch, **how)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)  # none is zero, none are equal
        words = {key: how[key] for key in how if key == "words"}
        args = vars(fairseq.tiny(arch, flags, **words))
        kind = "transformer_lm" if arch == "transformer_lm" else "fast_weight_lm"
        cfg = {
            group: {name: args.get(name, value) for name, value in defaults.items()} | {"_name": defaults["_name"]}
            for group, defaults in configuration(kind).items()
            if isinstance(defaults, dict)
        }
        state = {
            "args": None,
            "cfg": cfg,
            "model": model.state_dict(),
            "optimizer_history": [{"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam"}],
            "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
            "task_state": {},
        }
        state["optimizer_history"][0] |= {"lr_scheduler_state": {}, "num_updates": 0}
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / "checkpoint_best.pt")
        (folder / "dict.txt").write_bytes((fairseq.data(**words) / "dict.txt").read_bytes())
        return model

    return write
