"""Converts Hugging Face folders for fairseq."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fairseq_fastweights import model_sizes
from fairseq_fastweights.conversion.families.family import EMBEDDINGS, OUTPUT
from fairseq_fastweights.conversion.families.table import WITHIN, read_family
from fairseq_fastweights.conversion.files.checkpoints import write_checkpoint
from fairseq_fastweights.conversion.files.folders import (
    ORIGINALS,
    RECORD,
    check_target,
    copy_files,
    files_in,
    new_folder,
    path_of,
)
from fairseq_fastweights.conversion.files.weight_files import WeightFiles, check_weights, read_json
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import read_whole_tokenizer
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings

logger = logging.getLogger(__name__)

BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
"""The ends of names in files of weights that are those of buffers, as a causal mask's, which are not learned."""


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
    alone, name_of = WITHIN.get(str(whole.get("model_type")), (dict, str))
    config = alone(whole)
    # A multimodal model is kept as its language model alone.
    kept = json.dumps(config, indent=2) + "\n" if config != whole else None
    originals = files_in(source)
    family = read_family(whole, set(), end_of_text=0)  # checks the settings, before files of gigabytes are opened
    tokenizer = read_whole_tokenizer(source, family.byte_level)
    if end_of_text is not None:
        if end_of_text not in tokenizer.added:
            known = ", ".join(list(tokenizer.added)[:40]) or "it has none"
            raise InvalidInput(f"end_of_text is {end_of_text!r}; it must be an added token of the tokenizer: {known}")
        config |= {"eos_token_id": tokenizer.added[end_of_text]}
    # The weights: names and shapes before any is read.
    files = WeightFiles(source, name_of)
    check_layers(source, config, len(files.shapes))
    family = read_family(config, set(files.shapes), end_of_text=tokenizer.end_of_text)
    tokenizer.check(family.vocabulary, family.end_of_text)
    found = {name: shape for name, shape in files.shapes.items() if not name.endswith(BUFFERS)}
    expected = {name: tuple(weight.shape) for name, weight in family.join(family.model.parameters).items()}
    copies = {output: name for output, name in family.copies.items() if output in found}
    expected |= {output: expected[name] for output, name in copies.items()}
    check_weights(f"{source}: the weights do not fit config.json", found, expected)
    for output, name in copies.items():
        if not torch.equal(files.read(output), files.read(name)):
            raise InvalidInput(
                f"{source}: tie_word_embeddings is true in config.json, but {output} is not {name}; one of them must "
                "change"
            )
    model = family.split(files.read)
    if family.copies:
        model[OUTPUT] = model[EMBEDDINGS]

    with new_folder(target) as folder:
        write_checkpoint(folder / "model.pt", family.model.cfg, model, family.model.settings)
        family.dictionary.save(str(folder / "dict.txt"))
        tokenizer.write(folder, family.vocabulary, family.end_of_text)
        # The options are for a model with other mixers, which gets these weights.
        flags = family.flags(without=("softmax-attention-layers", "tokens-per-sample"))
        (folder / "options.txt").write_text(f"--arch=fast_weight_lm {' '.join(flags)}\n", encoding="ascii")
        record = {"weights": sorted(found), "end_of_text": family.end_of_text}
        record["mixers"] = checkpoint_settings.decode(family.model.settings)["mixers"]
        (folder / RECORD).write_text(json.dumps(record))
        copy_files(originals, folder / ORIGINALS)
        if kept is not None:
            (folder / ORIGINALS / "config.json").write_text(kept, encoding="utf-8")
    if files.left_out:
        logger.warning("%s: left out are %d weights that are no part of the language model", source, files.left_out)
    return f"--bpe tokenizer_json --tokenizer-json-folder {target}"


def check_layers(source: Path, settings: Mapping[str, Any], weights: int) -> None:
    """Raises a `ValueError` if config.json has more layers than there are weights, before a loop over the layers."""
    for name in ("num_hidden_layers", "n_layer"):
        if name in settings and settings[name] > model_sizes.most_layers(weights):
            raise InvalidInput(
                f"{source}: the weights do not fit config.json: {name} is {settings[name]}, and there are {weights}"
            )
