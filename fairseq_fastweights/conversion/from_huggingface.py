"""Converts Hugging Face folders for fairseq."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights import model_sizes
from fairseq_fastweights.conversion.families.table import Family, is_buffer, language_model, read_family
from fairseq_fastweights.conversion.files.checkpoints import configuration, write_checkpoint
from fairseq_fastweights.conversion.files.folders import (
    ORIGINALS,
    RECORD,
    check_target,
    copy_files,
    new_folder,
    original_files,
    path_of,
)
from fairseq_fastweights.conversion.files.weight_files import WeightFiles, check_weights, read_json
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import read_whole_tokenizer, tokenizer_options
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.description import layer_mixers

logger = logging.getLogger(__name__)


def from_huggingface(source: Path, target: Path, *, end_of_text: str | None = None) -> str:
    """Converts a Hugging Face folder with a language model of `families.table.FAMILIES` into a folder for fairseq.

    It holds `model.pt`, a checkpoint of `fast_weight_lm` with the same mixers and dtypes; `options.txt`, the options of
    fairseq-train for a model of its shape; `dict.txt`; for `--bpe`, `tokenizer.json` and `tokenizer_words.json`, and,
    of a tokenizer like GPT-2's, `encoder.json` and `vocab.bpe`; and, for the conversion back, `conversion.json` and the
    folder `huggingface`.

    Args:
        source: the folder.
        target: the new folder.
        end_of_text: the added token of the tokenizer that ends texts; None for the one in the folder's settings.

    Returns:
        The options of fairseq's commands that name the tokenizer.

    Raises:
        ValueError: if anything is missing, broken, unsafe or unsupported; the message names it, and nothing is written.
        OSError: if the target cannot be written; nothing is left of it.
    """
    source, target = path_of("source", source), path_of("target", target)
    check_target(target)
    if not source.is_dir():
        raise InvalidInput(f"{source}: SOURCE must be a folder, a GGUF file, or a model's name on the hub")
    if not (source / "config.json").exists() and (packed := sorted(source.glob("*.gguf"))):
        raise InvalidInput(f"{source}: there is no config.json, but a GGUF file; give the file: {packed[0]}")
    whole = read_json(source / "config.json")
    config, name_of = language_model(whole)
    # A multimodal model is kept as its language model alone.
    alone = None if config is whole else json.dumps(config, indent=2) + "\n"
    originals = original_files(source)
    family = read_family(whole, set(), end_of_text=0)  # checks the settings, before files of gigabytes are opened
    tokenizer = read_whole_tokenizer(source, family.byte_level)
    if end_of_text is not None:
        if end_of_text not in tokenizer.added:
            known = ", ".join(list(tokenizer.added)[:40]) or "it has none"
            raise InvalidInput(f"end_of_text is {end_of_text!r}; it must be an added token of the tokenizer: {known}")
        config |= {"eos_token_id": tokenizer.added[end_of_text]}
    # The weights: names and shapes before any is read.
    files = WeightFiles(source)
    left_out = files.rename(name_of)
    check_layers(source, config, len(files.shapes))
    family = read_family(config, set(files.shapes), end_of_text=tokenizer.end_of_text)
    tokenizer.check(family.vocabulary, family.end_of_text)
    names = _check_names(source, files, family)
    model = family.split(files.read)
    if family.tied:
        model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]
    settings = settings_of(family)

    with new_folder(target) as folder:
        model["decoder.version"] = torch.tensor([3.0])
        model[f"decoder.{checkpoint_settings.NAME}"] = settings
        write_checkpoint(folder / "model.pt", configuration(family.options), model)
        family.dictionary().save(str(folder / "dict.txt"))
        tokenizer.write(folder, family.vocabulary, family.end_of_text)
        # The options are for a model with other mixers, which gets these weights.
        flags = family.flags(without=("softmax-attention-layers", "tokens-per-sample"))
        (folder / "options.txt").write_text(f"--arch=fast_weight_lm {' '.join(flags)}\n", encoding="ascii")
        record = {"weights": names, "end_of_text": family.end_of_text}
        record["mixers"] = checkpoint_settings.decode(settings)["mixers"]
        (folder / RECORD).write_text(json.dumps(record))
        copy_files(originals, folder / ORIGINALS)
        if alone is not None:
            (folder / ORIGINALS / "config.json").write_text(alone, encoding="utf-8")
    if left_out:
        logger.warning("%s: left out are %d weights that are no part of the language model", source, len(left_out))
    return str(tokenizer_options(target))


def _check_names(source: Path, files: WeightFiles, family: Family) -> list[str]:
    """Checks the names and shapes of the weights, and a tied output layer; returns the names, without buffers."""
    found = {name: shape for name, shape in files.shapes.items() if not is_buffer(name)}
    expected = {name: shape for weight in family.weights for name, shape in weight.shapes.items()}
    copied = family.tied and family.output_name in found
    if copied:
        expected[family.output_name] = expected[family.input_name]
    check_weights(f"{source}: the weights do not fit config.json", found, expected)
    if copied and not torch.equal(files.read(family.output_name), files.read(family.input_name)):
        raise InvalidInput(
            f"{source}: tie_word_embeddings is true in config.json, but {family.output_name} is not "
            f"{family.input_name}; one of them must change"
        )
    return sorted(found)


def check_layers(source: Path, settings: Mapping[str, Any], weights: int) -> None:
    """Raises a `ValueError` if config.json has more layers than there are weights, before a loop over the layers."""
    for name in ("num_hidden_layers", "n_layer"):
        if name in settings and settings[name] > model_sizes.most_layers(weights):
            raise InvalidInput(
                f"{source}: the weights do not fit config.json: {name} is {settings[name]}, and there are {weights}"
            )


def settings_of(family: Family) -> Tensor:
    """The settings of the model that its checkpoint records."""
    options = configuration(family.options).model
    return checkpoint_settings.settings_of(options, layer_mixers(options), family.dictionary())
