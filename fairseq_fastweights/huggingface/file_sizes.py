"""Compares the model of a config.json with the files of its weights, before anything of its size is made.

transformers makes weights that are in no file anew, whatever their size is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fairseq_fastweights import model_sizes
from fairseq_fastweights.files import safetensors_digests
from fairseq_fastweights.invalid_input import InvalidInput

_NAMES = ("model*.safetensors", "pytorch_model*.bin")
"""Of files of weights; a training leaves others beside them."""

if TYPE_CHECKING:
    from fairseq_fastweights.huggingface.configuration import FastWeightConfig


def check_folder(folder: Path, config: FastWeightConfig) -> None:
    """Raises a `ValueError` if a file of weights in a folder is damaged, or they have not as many layers."""
    files = [file for pattern in _NAMES for file in sorted(folder.glob(pattern))]
    weights = sum(len(_weights_in(file, config, {})) for file in files)
    # A layer takes memory even without numbers, so their count is checked before the model is built.
    layers = config.num_hidden_layers
    if files and layers > model_sizes.most_layers(weights):
        raise InvalidInput(f"{folder}: num_hidden_layers is {layers} in config.json, and there are {weights} weights")


def check_model(model: nn.Module, files: Iterable[str], config: FastWeightConfig) -> dict[str, Tensor] | None:
    """Raises a `ValueError` if a file of a model is damaged, or the model, without numbers yet, is too large for them.

    Returns the weights in files of torch.save, to be read by nobody else; None if there are none.
    """
    loaded = dict[str, Tensor]()
    shapes = {file: _weights_in(Path(file), config, loaded).values() for file in files}
    held = {file: sum(map(math.prod, shapes[file])) for file in shapes}
    # The model has no memory yet (device meta): its size is known before any is taken.
    tensors = sorted([*model.parameters(), *model.buffers()], key=lambda tensor: tensor.numel())
    wanted, size = 4 * sum(tensor.numel() for tensor in tensors), 4 * sum(held.values())
    if held and wanted > model_sizes.most_bytes(size):
        shape = tuple(tensors[-1].shape)
        setting = model_sizes.likely(model_sizes.whole_numbers(config.to_dict()), shape)
        raise InvalidInput(
            f"{setting} in config.json, and it asks for a tensor of shape {shape} in a model of {wanted:,} bytes in "
            f"float32; the weights in {Path(next(iter(held))).parent} have {size:,}"
        )
    return loaded or None


def _weights_in(file: Path, config: FastWeightConfig, loaded: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The names of the weights in a file and their shapes, once it is known to be undamaged.

    `loaded` gets those of a file of torch.save. Anything but floating-point numbers is a `ValueError`.
    """
    if file.suffix == ".safetensors":
        if damage := safetensors_digests.why_damaged(file):
            raise InvalidInput(f"{file} {damage}")
        described = safetensors_digests.described_in(file)
    else:
        loaded |= (weights := safetensors_digests.weights_in_pickle(file))
        # As safetensors calls the types.
        described = {
            name: ("F" if x.is_floating_point() else str(x.dtype).removeprefix("torch."), tuple(x.shape))
            for name, x in weights.items()
        }
    for name, (kind, _) in described.items():
        if not kind.startswith(("F", "BF")) and getattr(config, "quantization_config", None) is None:
            raise InvalidInput(f"{file}: weight {name} is of type {kind}; it must be floating-point")
    return {name: shape for name, (_, shape) in described.items()}
