"""Reads the base model of a transfer: a Transformer language model that fairseq trained, since 2019."""

from __future__ import annotations

import logging
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from torch import Tensor

from fairseq_fastweights.conversion.files.checkpoints import options_in
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings

logger = logging.getLogger(__name__)

# Names in a checkpoint that are no parameters'.
_BUFFERS = re.compile(r"(.*\.)?(version|_float_tensor|settings_version)|decoder\.embed_positions\.weights")
_OLD_NORM = re.compile(r"(decoder\.layers\.\d+\.)layer_norms\.([02])\.(weight|bias)")
_NORMS = {"0": "self_attn_layer_norm", "2": "final_layer_norm"}


@dataclass
class BaseModel:
    """A trained model.

    Attributes:
        file: the checkpoint.
        weights: its parameters, by today's names.
        options: those of its model; options that its fairseq did not have are missing.
    """

    file: Path
    weights: dict[str, Tensor]
    options: dict[str, Any]


def find_files(path: str) -> tuple[Path, Path]:
    """Finds the checkpoint and the dictionary of `--transfer-from`, or raises a `ValueError`."""
    given = Path(path)
    file = given / "model.pt" if given.is_dir() else given
    if not file.is_file():
        raise InvalidInput(
            f"transfer_from is {path!r}, but there is no file {file}; it must be a folder with model.pt and dict.txt, "
            "or a checkpoint with dict.txt beside it"
        )
    dictionary = file.parent / "dict.txt"
    if not dictionary.is_file():
        raise InvalidInput(
            f"transfer_from is {path!r}, but there is no {dictionary}; the weights belong to the words in it"
        )
    return file, dictionary


def check_dictionary(file: Path, dictionary: Dictionary) -> None:
    """Raises a `ValueError` with the first difference if the dictionary in `file` is not `dictionary`."""
    theirs, ours = Dictionary.load(str(file)).symbols, dictionary.symbols
    if theirs == ours:
        return
    if len(theirs) != len(ours):
        difference = f"{file} has {len(theirs)} types, that of the data {len(ours)}"
    else:
        at = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
        difference = f"type {at} is {theirs[at]!r} in {file} and {ours[at]!r} in that of the data"
    raise InvalidInput(
        f"the dictionary of transfer_from is not that of the data: {difference}. The published dictionary of the "
        "Baevski & Auli checkpoint, for one, is in another order than a freshly made one. Binarise the data with "
        f"fairseq-preprocess --srcdict {file}"
    )


def read_base_model(file: Path) -> BaseModel:
    """Reads the model in a checkpoint; raises a `ValueError` if the file is damaged or holds no Transformer."""
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(file))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise InvalidInput(f"{file} is not a checkpoint that fairseq wrote: {type(error).__name__} {error}") from error
    weights = state["model"]
    if not isinstance(weights, dict) or not any(str(name).startswith("decoder.layers.") for name in weights):
        raise InvalidInput(f"{file} holds no Transformer language model: no weight is named decoder.layers...")
    settings = checkpoint_settings.read(weights, "decoder")
    if settings is not None and settings.get("mixers") != "softmax":
        raise InvalidInput(
            f"{file} holds a model with other mixers than softmax ({settings.get('mixers')}); transfer_from takes "
            "Transformers. To train it further, use --finetune-from-model"
        )
    return BaseModel(file, _upgrade(weights), options_in(state, "model"))


def follow_heads(options: Any, base: BaseModel, groups: frozenset[str]) -> None:
    """Sets a model's number of heads to that in the settings of the base model, unless the command line has one.

    Weights of the same shapes can have any number of heads, so that a checkpoint may fit an architecture with another
    number, and the model would compute something else.

    Args:
        options: those of the model; they are changed.
        base: the base model.
        groups: the groups of weights to take; without attention, nothing is done.
    """
    option = "decoder_attention_heads"
    theirs, ours = base.options.get(option), getattr(options, option, None)
    if "attention" not in groups or ours is None:
        return
    if theirs is None:
        logger.warning("transfer_from: the settings of %s do not say %s; it is taken for %s", base.file, option, ours)
        return
    width = options.decoder_embed_dim
    if type(theirs) is not int or theirs < 1 or (getattr(options, "head_dim", 0) == 0 and width % theirs):
        raise InvalidInput(
            f"{base.file} has {option} {theirs!r} in its settings; it must be a divisor of decoder_embed_dim, {width}"
        )
    architecture = Namespace()
    ARCH_CONFIG_REGISTRY[getattr(options, "_name", None) or options.arch](architecture)
    default = getattr(architecture, option, TransformerLanguageModelConfig.decoder_attention_heads)
    # fairseq has filled in defaults by now: the command line alone shows whether a user set the number.
    words = {word.partition("=")[0] for word in sys.argv[1:]}
    asked_for = ours != default or not words.isdisjoint(("--decoder-attention-heads", f"model.{option}"))
    change = ""
    if theirs != ours and not asked_for:
        options.decoder_attention_heads = theirs
        change = f", and so has the model, not {ours} as its architecture"
    logger.info("transfer_from: the settings of %s say %s %s%s", base.file, option, theirs, change)


def _upgrade(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames parameters to today's names, and leaves out buffers."""
    upgraded = {}
    for name, tensor in weights.items():
        # fairseq 0.6 numbered norms, and had q, k and v in one matrix.
        norm = _OLD_NORM.fullmatch(name)
        if norm is not None:
            upgraded[f"{norm[1]}{_NORMS[norm[2]]}.{norm[3]}"] = tensor
        elif name.endswith((".in_proj_weight", ".in_proj_bias")):
            start, kind = name.rsplit("in_proj_", 1)
            for projection, part in zip("qkv", tensor.chunk(3), strict=True):
                upgraded[f"{start}{projection}_proj.{kind}"] = part
        elif name == "decoder.embed_out":
            upgraded["decoder.output_projection.weight"] = tensor
        elif not _BUFFERS.fullmatch(name):
            upgraded[name] = tensor
    return upgraded
