"""Settings of the model in its checkpoint, beyond the names and shapes of parameters.

They are a tensor of character codes, which all tools for checkpoints can handle (averaging, sharding, half precision,
the safe loader). The name of the buffer ends in "version" because the moving average of `--store-ema` multiplies all
other buffers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import MIXERS, build_mixer
from fairseq_fastweights.models.description import mixer_settings, parse_layers

NAME = "settings_version"
"""The name of the buffer that holds the settings."""


class Recorded:
    """A module of fairseq's that keeps its settings in its checkpoint, in the buffer `settings_version`."""

    settings_version: Tensor
    register_buffer: Callable[..., None]

    def record(self, settings: dict[str, Any]) -> None:
        """Keeps the settings that must be equal in a checkpoint and the model that loads it."""
        self.register_buffer(NAME, encode(settings))

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Checks that the checkpoint was made by a model with these settings, before any weight is loaded."""
        check(state_dict, name, self.settings_version)
        upgraded: dict[str, Any] = super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]
        return upgraded


def settings_of(options: Any, mixers: Sequence[str], dictionary: Dictionary) -> Tensor:
    """The settings of the language model that is built with these options, as in its checkpoint.

    Args:
        options: all of the model's.
        mixers: the names of its layers' mixers.
        dictionary: its dictionary.
    """
    settings = mixer_settings(options, options.decoder_attention_heads)
    # Only the mixers' settings are asked for: their weights need no memory.
    with torch.device("meta"):
        built = {name: build_mixer(name, options.decoder_embed_dim, settings) for name in set(mixers)}
    return encode(describe(options, dictionary, [(name, built[name]) for name in mixers]))


def describe(options: Any, dictionary: Dictionary, mixers: Sequence[tuple[str, nn.Module]]) -> dict[str, Any]:
    """The settings of a language model's decoder that names and shapes of parameters do not show."""
    settings = describe_dictionary(dictionary)
    if options.parallel_residual:
        settings["parallel residual"] = True
    if options.rms_norm_eps is not None:
        settings["rms norm eps"] = options.rms_norm_eps
    if options.zero_centered_norms:
        settings["zero-centered norms"] = True
    if behind := parse_layers(options.output_norm_layers, len(mixers), "output_norm_layers"):
        settings["output norm layers"] = sorted(behind)
    return settings | describe_mixers(mixers, heads=options.decoder_attention_heads)


def describe_dictionary(dictionary: Dictionary, prefix: str = "") -> dict[str, Any]:
    """The settings that identify a dictionary."""
    digest = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()[:16]
    return {f"{prefix}dictionary size": len(dictionary), f"{prefix}dictionary digest": digest}


def describe_mixers(mixers: Sequence[tuple[str, nn.Module | None]], prefix: str = "", heads: int = 0) -> dict[str, Any]:
    """The settings of the mixers of all layers.

    Args:
        mixers: each with its name; fairseq's own attention, which is no `Mixer`, has no settings.
        prefix: of the settings' names, for the place in the model.
        heads: number of heads of attention; mixers with another number of heads record it.
    """
    settings: dict[str, Any] = {f"{prefix}mixers": together([name for name, _ in mixers])}
    for name, mixer in mixers:
        if isinstance(mixer, Mixer):
            own = mixer.settings()
            # Checkpoints from before these could differ have no such setting, and fit all the same.
            if MIXERS[name].heads == "fast_weight_heads" and heads not in (0, mixer.num_heads):
                own["fast weight heads"] = mixer.num_heads
            settings |= {f"{prefix}{name} {setting}": value for setting, value in own.items()}
    return settings


def together(names: list[str]) -> str | list[str]:
    """The names, or one name if all are the same."""
    return names[0] if len(set(names)) == 1 else names


def prune(state_dict: dict[str, Any], module: str, kept: list[int]) -> None:
    """Reduces a checkpoint's settings of a decoder to those of the layers `kept`.

    Checkpoints without settings, and those in which all layers have the same mixer, stay as they are.

    Args:
        state_dict: of a model.
        module: the decoder's name in it.
        kept: sorted numbers of layers, from 1.
    """
    settings = read(state_dict, module)
    if settings is None:
        return
    before = settings.get("mixers")
    if isinstance(before, list):
        if len(before) < max(kept, default=0):
            raise InvalidInput(f"{NAME} has the mixers of {len(before)} layers, and layer {max(kept)} is to be kept")
        left = [before[number - 1] for number in kept]
        settings["mixers"] = together(left)
        # The settings of a kind of mixer go with the last layer of that kind.
        gone = tuple(f"{name} " for name in set(before) - set(left))
        settings = {name: x for name, x in settings.items() if not name.startswith(gone)}
    if behind := settings.pop("output norm layers", None):
        left = [new for new, old in enumerate(kept, 1) if old in behind]
        settings |= {"output norm layers": left} if left else {}
    state_dict[f"{module}.{NAME}"] = encode(settings)


def encode(settings: dict[str, Any]) -> Tensor:
    """Encodes settings as a tensor, for a buffer."""
    return torch.tensor(list(json.dumps(settings, sort_keys=True).encode()), dtype=torch.int64)


def read(state_dict: dict[str, Any], module: str) -> dict[str, Any] | None:
    """Reads the settings of a module in a checkpoint; None if it has none, as those of other models."""
    codes = state_dict.get(f"{module}.{NAME}")
    if codes is None:
        return None
    settings = decode(codes)
    _check_kinds(settings)
    return settings


def _check_kinds(settings: dict[str, Any]) -> None:
    """Raises an `InvalidInput` for names of mixers and numbers of layers that are none."""
    for name, value in settings.items():
        items = value if isinstance(value, list) else [None]
        if name.endswith("mixers"):
            right = isinstance(value, str) or all(isinstance(item, str) for item in items)
        elif name == "output norm layers":
            right = all(isinstance(item, int) for item in items)
        else:
            continue
        if value is not None and not right:
            raise InvalidInput(
                f"{NAME} has {name} {str(value)[:100]}; they must be names of mixers or numbers of layers"
            )


def check(state_dict: dict[str, Any], prefix: str, own: Tensor) -> None:
    """Checks that a checkpoint's settings of the module `prefix` are the model's `own`, before any weight is loaded.

    Checkpoints of other models (fairseq's Transformer) have no settings; they get the model's.

    Raises:
        ValueError: listing the settings that differ.
    """
    expected = decode(own)
    saved = read(state_dict, prefix)
    # fairseq's own Transformer has no settings in its checkpoint.
    saved = expected if saved is None else saved
    names = {name for name in saved | expected if saved.get(name) != expected.get(name)}
    if any(name.endswith("mixers") for name in names):
        # Settings that only one of them has belong to a mixer that the other lacks.
        names = {name for name in names if name in saved and name in expected}
    different = [
        f"{name} is {saved.get(name)!r} in the checkpoint and {expected.get(name)!r} in the model"
        for name in sorted(names)
    ]
    if different:
        raise InvalidInput("the checkpoint does not fit the model: " + "; ".join(different))
    # So that strict loading finds the buffer in every checkpoint.
    state_dict[f"{prefix}.{NAME}"] = own


def decode(codes: Tensor) -> dict[str, Any]:
    """Decodes settings that `encode` encoded.

    Raises:
        ValueError: if they are something else.
    """
    try:
        settings = json.loads(bytes(codes.tolist()).decode())
    except (AttributeError, ValueError, TypeError, RecursionError) as error:
        raise InvalidInput(f"{NAME} holds no settings ({error})") from None
    if not isinstance(settings, dict):
        raise InvalidInput(f"{NAME} holds {type(settings).__name__}; it must hold settings by name")
    return settings
