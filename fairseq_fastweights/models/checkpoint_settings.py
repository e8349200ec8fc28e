"""What a checkpoint says of the model that made it, beyond the names and shapes of parameters.

It is a tensor of character codes, so that every tool that handles checkpoints (averaging, sharding, half precision, the
safe loader) can handle it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_fastweights.modules.memory_attention import MemoryAttention


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


def check(state_dict: dict[str, Any], key: str, own: Tensor) -> None:
    """Checks that the settings under `key` in a checkpoint are the model's `own`, before any weight is loaded.

    Checkpoints of other models (fairseq's Transformer) carry no settings: they are given the model's.

    Raises:
        ValueError: naming all that differ.
    """
    saved, expected = _decode(state_dict.setdefault(key, own)), _decode(own)
    different = [
        f"{setting} is {saved.get(setting)!r} in the checkpoint and {expected.get(setting)!r} in the model"
        for setting in sorted(saved | expected)
        if saved.get(setting) != expected.get(setting)
    ]
    if different:
        raise ValueError("the checkpoint does not fit the model: " + "; ".join(different))


def _decode(codes: Tensor) -> dict[str, Any]:
    return json.loads(bytes(codes.tolist()).decode())
