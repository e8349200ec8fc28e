"""What a checkpoint says of the model that made it, beyond the names and shapes of parameters.

It is a tensor of character codes, so that every tool that handles checkpoints (averaging, sharding, half precision, the
safe loader) can handle it. The moving average of `--store-ema` multiplies all that is in a model but what is named a
version.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_fastweights.modules.memory_attention import MemoryAttention

# Of the buffer that the settings are in; and what it was called before.
NAME = "settings_version"
_FORMER_NAME = "settings"


def describe_dictionary(dictionary: Dictionary, prefix: str = "") -> dict[str, Any]:
    """The settings that tell a dictionary from another."""
    digest = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()[:16]
    return {f"{prefix}dictionary size": len(dictionary), f"{prefix}dictionary digest": digest}


def describe_attention(model: nn.Module, prefix: str, name: str) -> dict[str, Any]:
    """The settings of the attention that a model's layers have under a name; it is the same in all layers."""
    for path, module in model.named_modules():
        if path.endswith(f".{name}") and isinstance(module, MemoryAttention):
            return {f"{prefix}{setting}": value for setting, value in module.settings().items()}
    return {f"{prefix}update rule": "none, softmax attention"}


def encode(settings: dict[str, Any]) -> Tensor:
    """Settings as a tensor for a buffer."""
    return torch.tensor(list(json.dumps(settings, sort_keys=True).encode()), dtype=torch.int64)


def rename_former(state_dict: dict[str, Any], prefix: str) -> None:
    """Gives a checkpoint's settings of the module `prefix` the name that they have today."""
    former = f"{prefix}.{_FORMER_NAME}"
    if former in state_dict:
        state_dict.setdefault(f"{prefix}.{NAME}", state_dict.pop(former))


def check(state_dict: dict[str, Any], prefix: str, own: Tensor) -> None:
    """Checks that a checkpoint's settings of the module `prefix` are the model's `own`, before any weight is loaded.

    Checkpoints of other models (fairseq's Transformer) carry no settings: they are given the model's.

    Raises:
        ValueError: naming all that differ.
    """
    rename_former(state_dict, prefix)
    saved, expected = decode(state_dict.setdefault(f"{prefix}.{NAME}", own)), decode(own)
    different = [
        f"{setting} is {saved.get(setting)!r} in the checkpoint and {expected.get(setting)!r} in the model"
        for setting in sorted(saved | expected)
        if saved.get(setting) != expected.get(setting)
    ]
    if different:
        raise ValueError("the checkpoint does not fit the model: " + "; ".join(different))


def decode(codes: Tensor) -> dict[str, Any]:
    """Settings from what `encode` made of them."""
    return json.loads(bytes(codes.tolist()).decode())
