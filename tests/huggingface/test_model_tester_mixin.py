"""The common model tests of `transformers`, where they are: its source distribution has them, its wheel has not.

    pip download --no-deps --no-binary :all: transformers==5.20.2 && tar xzf transformers-5.20.2.tar.gz
    pip install parameterized accelerate
    TRANSFORMERS_TESTS=transformers-5.20.2/tests pytest -o addopts=--import-mode=importlib \
        tests/huggingface/test_model_tester_mixin.py

docs/huggingface.md lists those that do not apply, and why.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
import torch
from transformers.models.auto import modeling_auto

from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM, FastWeightModel
from fairseq_fastweights.mixers.registry import MIXERS

FOLDER = os.environ.get("TRANSFORMERS_TESTS")
if not FOLDER:
    pytest.skip("TRANSFORMERS_TESTS does not name the tests of transformers", allow_module_level=True)


def load_mixin() -> Any:
    """Their `ModelTesterMixin`, from a package that is not called `tests`, as ours is."""
    package = "transformers_tests"
    # Their tests of exporters and of `generate` are not in the source distribution.
    lacking = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
    for name in (package, *(f"{package}.{module}" for module in ("exporters", "generation", *lacking))):
        sys.modules[name] = ModuleType(name)
    for module, mixin in lacking.items():
        setattr(sys.modules[f"{package}.{module}"], mixin, type(mixin, (), {}))
    sys.modules[package].__path__ = [str(FOLDER)]
    common = importlib.import_module(f"{package}.test_modeling_common")
    # It reads which classes have which head from the names that transformers itself has ...
    modeling_auto.MODEL_MAPPING_NAMES["fast_weight"] = "FastWeightModel"
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["fast_weight"] = "FastWeightForCausalLM"
    # ... and how new a model is from the copyright line of its file: the tests of initialisation leave old ones out.
    recent = Path(FOLDER) / "recent.py"
    recent.write_text("# Copyright 2026\n")
    vars(common)["inspect"] = SimpleNamespace(**{**vars(inspect), "getfile": lambda kind: str(recent)})
    return common.ModelTesterMixin


SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "dropout": 0.0,
    "initializer_range": 0.02,
}
NAMES = list(MIXERS)
PATTERNS = [f"{one}:1,{other}:2" for one, other in zip(NAMES[::2], [*NAMES[1::2], NAMES[0]], strict=False)]


class ModelTester:
    """The attributes and methods that their mixin asks for."""

    batch_size, seq_length, is_training = 3, 7, True
    vocab_size, hidden_size, num_hidden_layers = 99, 32, 2

    def __init__(self, mixers: str) -> None:
        self.mixers = mixers

    def get_config(self) -> FastWeightConfig:
        return FastWeightConfig(**SIZES, mixers=self.mixers)

    def prepare_config_and_inputs_for_common(self) -> tuple[FastWeightConfig, dict[str, torch.Tensor]]:
        tokens = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


MIXIN = load_mixin()


def of(mixers: str) -> Any:
    def set_up(self: Any) -> None:
        self.model_tester = ModelTester(mixers)

    classes = (FastWeightModel, FastWeightForCausalLM)
    # `generate` is tested in test_generate.py: their mixin for it is not there.
    content = {"all_model_classes": classes, "all_generative_model_classes": (), "has_attentions": False}
    return type(f"Test{mixers.title()}", (MIXIN, TestCase), {**content, "setUp": set_up})


for number, pattern in enumerate(PATTERNS):
    globals()[f"TestMixers{number}"] = of(pattern)
