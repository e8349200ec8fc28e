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
from fairseq_fastweights.conversion.families.table import Family, buffers, language_model, read_family
from fairseq_fastweights.conversion.files.checkpoints import configuration, write_checkpoint
from fairseq_fastweights.conversion.files.folders import (
    ORIGINALS,
    RECORD,
    check_target,
    copy_files,
    file_in,
    new_folder,
    path_of,
)
from fairseq_fastweights.conversion.files.text_tables import text_table
from fairseq_fastweights.conversion.files.weight_files import WeightFiles, read_json
from fairseq_fastweights.conversion.tokenizers import file_names
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import read_whole_tokenizer, tokenizer_options
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.description import layer_mixers

logger = logging.getLogger(__name__)

_MOST_ROWS = 40


def from_huggingface(source: Path, target: Path, *, end_of_text: str | None = None) -> str:
    """Converts a Hugging Face folder with a language model of `families.table.FAMILIES` into a folder for fairseq.

    It holds `model.pt`, a checkpoint of `fast_weight_lm` with the source's attention or memories, in the dtypes of the
    source; `options.txt`, the options of fairseq-train for a model of its shape; `dict.txt`; for `--bpe`,
    `tokenizer.json` and `tokenizer_words.json`, and, of a tokenizer like GPT-2's, `encoder.json` and `vocab.bpe`; and,
    for the conversion back, `conversion.json` and the folder `huggingface`.

    Args:
        source: the folder.
        target: the new folder.
        end_of_text: the added token of the tokenizer that ends texts; None for the one in the source's settings.

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
    said = read_json(source / "config.json")
    config, named = language_model(said)
    alone = None if config is said else json.dumps(config, indent=2) + "\n"
    originals = original_files(source)
    family = read_family(said, set(), end_of_text=0)  # its settings, before files of gigabytes are opened
    tokenizer = read_whole_tokenizer(source, family.byte_level)
    if end_of_text is not None:
        config |= {"eos_token_id": _added_token(end_of_text, tokenizer.added)}
    files = WeightFiles(source)
    left_out = files.rename(named)
    check_layers(source, config, len(files.shapes))
    family = read_family(config, set(files.shapes), end_of_text=tokenizer.end_of_text)
    tokenizer.check(family.vocabulary, family.end_of_text)
    names = [name for name in files.shapes if not buffers(name)]
    copied = family.tied and family.output_name in names
    expected = {name: shape for weight in family.weights for name, shape in weight.shapes.items()}
    if copied:
        expected[family.output_name] = expected[family.input_name]
    check_weights(f"{source}: the weights do not fit config.json", {n: files.shapes[n] for n in names}, expected)
    if copied and not torch.equal(files.read(family.output_name), files.read(family.input_name)):
        raise InvalidInput(
            f"{source}: tie_word_embeddings is true in config.json, but {family.output_name} is not "
            f"{family.input_name}; one of them must change"
        )
    model: dict[str, Tensor] = {}
    for weight in family.weights:
        parts = weight.split(tuple(map(files.read, weight.shapes)))
        model |= {name: part.contiguous().clone() for name, part in zip(weight.ours, parts, strict=True)}
    if family.tied:
        model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]

    with new_folder(target) as folder:
        model["decoder.version"] = torch.tensor([3.0])
        model[f"decoder.{checkpoint_settings.NAME}"] = settings_of(family)
        write_checkpoint(folder / "model.pt", configuration(family.options), model)
        words = family.words()
        # fairseq-preprocess and the tasks take the order of the lines; the numbers are counts, of which there are none.
        (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in words), encoding="ascii")
        tokenizer.write(folder, family.vocabulary, family.end_of_text)
        # Of a Transformer, those of a model with other mixers, to which the weights are to go.
        flags = family.flags(without=("softmax-attention-layers", "tokens-per-sample"))
        (folder / "options.txt").write_text(f"--arch=fast_weight_lm {' '.join(flags)}\n", encoding="ascii")
        record = {"weights": sorted(names), "end_of_text": family.end_of_text}
        record["mixers"] = checkpoint_settings.decode(model[f"decoder.{checkpoint_settings.NAME}"])["mixers"]
        (folder / RECORD).write_text(json.dumps(record))
        copy_files(originals, folder / ORIGINALS)
        if alone is not None:
            (folder / ORIGINALS / "config.json").write_text(alone, encoding="utf-8")
    if left_out:
        logger.warning("%s: left out are %d weights that are no part of the language model", source, len(left_out))
    return str(tokenizer_options(target))


def source_mixers(folder: Path) -> Any:
    """The mixers of the source of a folder that `from_huggingface` made, as `checkpoint_settings` writes them."""
    return read_json(folder / RECORD).get("mixers", "softmax")


def _added_token(word: str, added: Mapping[str, int]) -> int:
    """The number of the tokenizer's added token that is to end texts."""
    if word not in added:
        known = ", ".join(list(added)[:_MOST_ROWS]) or "it has none"
        raise InvalidInput(f"end_of_text is {word!r}; it must be an added token of the tokenizer: {known}")
    return added[word]


def original_files(source: Path, within: str = ".") -> dict[str, Path]:
    """The files of a model that are kept for the conversion back, which alone are copied then.

    Args:
        source: a folder that may come from elsewhere.
        within: the subfolder with the files.

    Raises:
        ValueError: if one of them is a link out of `source`, or no regular file.
    """
    names = ("config.json", "generation_config.json", *file_names.FILES, *file_names.template_names(source / within))
    return {name: path for name in names if (path := file_in(source, f"{within}/{name}"))}


def check_layers(source: Path, settings: Mapping[str, Any], weights: int) -> None:
    """Raises a `ValueError` if config.json has more layers than there are weights: what follows looks at each."""
    for name in ("num_hidden_layers", "n_layer"):
        if name in settings and settings[name] > model_sizes.most_layers(weights):
            raise InvalidInput(
                f"{source}: the weights do not fit config.json: {name} is {settings[name]}, and there are {weights}"
            )


def check_weights(what: str, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Compares names and shapes.

    Raises:
        ValueError: if weights are missing, left over, or of another shape; the message lists them.
    """
    rows = [
        (name, str(found.get(name, "missing")), str(expected.get(name, "nothing of this name")))
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if not rows:
        return
    lines = text_table([("weight", "found", "expected"), *rows[:_MOST_ROWS]]).splitlines()
    lines += [f"and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    raise InvalidInput("\n  ".join([f"{what} ({len(rows)} of {len(found.keys() | expected.keys())}):", *lines]))


def settings_of(family: Family) -> Tensor:
    """The settings of the model that its checkpoint records."""
    options = configuration(family.options).model
    return checkpoint_settings.settings_of(options, layer_mixers(options), family.dictionary())
