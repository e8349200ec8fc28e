"""Converts models that fairseq trained into Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fairseq_fastweights.conversion.families.family import EMBEDDINGS, OUTPUT, Family, read_family
from fairseq_fastweights.conversion.files.folders import (
    FOR_FAIRSEQ,
    ORIGINALS,
    RECORD,
    check_target,
    copy_files,
    file_in,
    files_in,
    new_folder,
    original_mixers,
    path_of,
)
from fairseq_fastweights.conversion.files.weight_files import check_weights, read_json, read_state, save_weights
from fairseq_fastweights.conversion.to_transformers_class import write_as
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import FILES, PIECES
from fairseq_fastweights.conversion.trained_models import find_run, load_run
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings


def to_huggingface(
    source: Path,
    target: Path,
    *,
    model_type: str | None = None,
    checkpoint: Path | None = None,
    data: Path | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Makes a Hugging Face folder: config.json, model.safetensors, generation_config.json and a tokenizer.

    A model that `from_huggingface` converted, and that still has its original mixers, gets the class that it came
    from. All others get `FastWeightForCausalLM`, and a subfolder `fairseq` for the conversion back.

    Args:
        source: the checkpoint or its folder, as `path` of `load_for_causal_lm`.
        target: the new folder.
        model_type: one of `families.family.SERVED`, for one of transformers' classes; None for the class named above.
        checkpoint: another checkpoint, with the dictionary and tokenizer of `source`.
        data: the folder with its dict.txt, as for `load_for_causal_lm`.
        tokenizer: the folder of its tokenizer, as for `load_for_causal_lm`.

    Raises:
        ValueError: if a file is missing or cannot be used, or the model does not fit the class; the message lists the
            settings in which they differ. Nothing is written then.
        OSError: if the target cannot be written; nothing is left of it.
    """
    source, target = path_of("source", source), path_of("target", target)
    check_target(target)
    if _has_original_mixers(source, checkpoint):
        config = read_json(source / ORIGINALS / "config.json")
        if model_type in (None, config.get("model_type")):
            _restore_original(source, target, config, source / "model.pt" if checkpoint is None else checkpoint)
            return
    run = find_run(source, data, tokenizer, checkpoint)
    model, made, dictionary = load_run(run)
    if model_type is not None:
        try:
            write_as(model_type, target, model, dictionary, made, run.pieces)
        except ValueError as error:
            raise InvalidInput(f"{run.checkpoint}: {error}") from None
        return
    # The conversion back needs the dictionary, and fairseq's own files of the tokenizer.
    places = {"dict.txt": run.dictionary.parent}
    if run.pieces is not None:
        places |= dict.fromkeys((*PIECES, *FILES), run.pieces)
    copied = {name: path for name, place in places.items() if (path := file_in(place, name))}
    with new_folder(target) as folder:
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:
            raise OSError(f"model.safetensors: {error}") from error
        made.save_pretrained(folder)
        copy_files(copied, folder / FOR_FAIRSEQ)


def _has_original_mixers(folder: Path, checkpoint: Path | None) -> bool:
    """True if `from_huggingface` made a folder, and the checkpoint, by default its own, still has its mixers."""
    if not (folder / RECORD).is_file():
        return False
    checkpoint = checkpoint or folder / "model.pt"
    if not checkpoint.is_file():
        return True
    settings = checkpoint_settings.read(read_state(checkpoint)["model"], "decoder")
    return settings is None or bool(settings.get("mixers") == original_mixers(folder))


def _restore_original(source: Path, target: Path, config: Mapping[str, Any], checkpoint: Path) -> None:
    """Makes a folder with a model of the class that `from_huggingface` converted.

    It gets `model.safetensors` in the checkpoint's dtypes, `config.json` and the original files of the tokenizer; no
    other files of `source`.
    """
    record = read_json(source / RECORD)
    names = record.get("weights")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"{source / RECORD}: weights must be a list of names")
    originals = files_in(source, within=ORIGINALS)
    chosen = {} if record.get("end_of_text") is None else {"eos_token_id": record["end_of_text"]}
    family = read_family({**config, **chosen}, set(names))
    weights = family.join(_read_checkpoint(checkpoint, family))
    weights |= {output: weights[name].clone() for output, name in family.copies.items() if output in names}
    with new_folder(target) as folder:
        save_weights(folder, weights)
        copy_files(originals, folder)
        _note_dtype(folder / "config.json", config, {weight.dtype for weight in weights.values()})


def _read_checkpoint(path: Path, family: Family) -> dict[str, Tensor]:
    """Reads the model's weights, and checks that they belong to this model."""
    if not path.is_file():
        raise InvalidInput(f"{path}: there is no such checkpoint")
    model: dict[str, Tensor] = read_state(path)["model"]
    try:
        checkpoint_settings.check(model, "decoder", family.model.settings)
    except ValueError as error:
        raise InvalidInput(f"{path}: {error}") from None
    expected = {name: tuple(weight.shape) for name, weight in family.model.parameters.items()}
    if family.copies:
        expected[OUTPUT] = expected[EMBEDDINGS]
    ignored = ("decoder.version", f"decoder.{checkpoint_settings.NAME}")
    found = {name: tuple(weight.shape) for name, weight in model.items() if name not in ignored}
    check_weights(f"{path}: the weights do not fit the model that was converted", found, expected)
    return model


def _note_dtype(path: Path, config: Mapping[str, Any], types: set[torch.dtype]) -> None:
    """Changes the dtype in config.json if the weights were trained in another."""
    if len(types) != 1:
        return
    name = str(types.pop()).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    if any(config[key] != name for key in keys):
        path.write_text(json.dumps({**config, **dict.fromkeys(keys, name)}, indent=2) + "\n", encoding="utf-8")
