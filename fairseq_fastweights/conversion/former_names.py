"""Imports modules of this package by the names that they had before it had folders, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = __name__.rpartition(".")[0]
MODULES = {
    **{name: f"files.{name}" for name in ("checkpoints", "folders", "text_tables", "weight_files")},
    **{f"{name}_families": f"families.{name}" for name in ("fla", "gpt", "hybrid", "llama")},
    **{name: f"transfer.{name}" for name in ("freezing", "groups", "recurrent_swap", "source", "source_heads", "swap")},
    "attention_transfer": "transfer.attention",
    "transfer_options": "transfer.options",
    "family": "families.family",
    "source_config": "families.config_values",
    "source_weights": "families.weights",
    "byte_level_files": "tokenizers.byte_level_files",
    "kept_settings": "tokenizers.kept_settings",
    "tokenizer": "tokenizers.tokenizer_json",
    "whole_tokenizer": "tokenizers.tokenizer_json",
    "exported": "from_huggingface.own_classes",
    "gguf": "from_huggingface.gguf",
    "hub": "from_huggingface.hub",
    "huggingface": "from_huggingface.published",
    "export": "to_huggingface.own_classes",
    "originals": "to_huggingface.original_class",
    "served": "to_huggingface.served_classes",
    "tokenizers_of_runs": "to_huggingface.tokenizers",
    "fairseq_options": "options_and_config",
}
"""By the former names, the present ones."""


class FormerNames(MetaPathFinder, Loader):
    """Finds the former names, and puts the present modules in their place."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Knows the names in `MODULES` alone."""
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == PACKAGE and name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Loads the present module under the former name, too."""
        present = f"{PACKAGE}.{MODULES[module.__name__.rpartition('.')[2]]}"
        _warn(module.__name__, present)
        sys.modules[module.__name__] = import_module(present)


def attribute(folder: str, module: str, name: str) -> Any:
    """An attribute that `folder` had when it was a module, and that its `module` has now."""
    found = None if name.startswith("__") else getattr(import_module(f"{folder}.{module}"), name, None)
    if found is None:
        raise AttributeError(f"module {folder!r} has no attribute {name!r}")
    _warn(f"{folder}.{name}", f"{folder}.{module}")
    return found


def _warn(former: str, present: str) -> None:
    warnings.warn(f"{former} has moved to {present}", DeprecationWarning, stacklevel=3)


sys.meta_path.append(FormerNames())
