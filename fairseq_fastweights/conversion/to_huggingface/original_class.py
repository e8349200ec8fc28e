"""Converts folders that `from-huggingface` made back to the model class that they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.conversion.families.table import Family, read_family
from fairseq_fastweights.conversion.files.checkpoints import read_state
from fairseq_fastweights.conversion.files.folders import ORIGINALS, RECORD, copy_files, new_folder
from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.conversion.from_huggingface.published import check_weights, original_files, settings_of
from fairseq_fastweights.files.safetensors_digests import note_digest
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings


def restore_original(source: Path, target: Path, checkpoint: Path | None = None) -> None:
    """Makes a folder with a model of the class that `from_huggingface` converted.

    Args:
        source: the folder, with its `conversion.json`.
        target: the new folder, which gets `model.safetensors` in the checkpoint's dtypes, `config.json` and the
            original files of the tokenizer; of other files in the source's folder nothing is taken.
        checkpoint: a checkpoint of the same model, trained further; None for the folder's `model.pt`.

    Raises:
        ValueError: if a file is missing, cannot be used or is a link out of the folder, or the checkpoint has fast
            weights, which the class lacks.
        OSError: if the target cannot be written; nothing is left of it.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise InvalidInput("writing model.safetensors needs the package safetensors: pip install safetensors") from None

    record = read_json(source / RECORD)
    names = record.get("weights")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"{source / RECORD}: weights must be a list of names")
    originals = original_files(source, ORIGINALS)
    config = read_json(source / ORIGINALS / "config.json")
    family = read_family(config | _chosen(record), set(names))
    path = source / "model.pt" if checkpoint is None else checkpoint
    model = _read_checkpoint(path, family)
    weights: dict[str, Tensor] = {}
    for weight in family.weights:
        joined = weight.join(tuple(model[name] for name in weight.ours))
        weights |= {name: part.contiguous().clone() for name, part in zip(weight.shapes, joined, strict=True)}
    if family.tied and family.output_name in names:
        weights[family.output_name] = weights[family.input_name].clone()

    with new_folder(target) as folder:
        try:
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            note_digest(folder / "model.safetensors")
        except SafetensorError as error:
            raise OSError(f"model.safetensors: {error}") from error
        copy_files(originals, folder)
        _note_type(folder / "config.json", config, {weight.dtype for weight in weights.values()})


def _chosen(record: dict[str, Any]) -> dict[str, Any]:
    """The setting of config.json that names the end-of-text token which `from_huggingface` took."""
    return {} if record.get("end_of_text") is None else {"eos_token_id": record["end_of_text"]}


def _read_checkpoint(path: Path, family: Family) -> dict[str, Tensor]:
    """Reads the model's weights, and checks that they belong to this model."""
    if not path.is_file():
        raise InvalidInput(f"{path}: there is no such checkpoint")
    model: dict[str, Tensor] = read_state(path)["model"]
    try:
        checkpoint_settings.check(model, "decoder", settings_of(family))
    except ValueError as error:
        raise InvalidInput(f"{path}: {error}") from None
    expected = family.shapes_of_ours()
    if family.tied:
        expected["decoder.output_projection.weight"] = expected["decoder.embed_tokens.weight"]
    ignored = ("decoder.version", f"decoder.{checkpoint_settings.NAME}")
    found = {name: tuple(weight.shape) for name, weight in model.items() if name not in ignored}
    check_weights(f"{path}: the weights do not fit the model that was converted", found, expected)
    return model


def _note_type(path: Path, config: dict[str, Any], types: set[torch.dtype]) -> None:
    """Changes the dtype in config.json if the weights were trained in another."""
    if len(types) != 1:
        return
    name = str(types.pop()).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    if any(config[key] != name for key in keys):
        path.write_text(json.dumps(config | dict.fromkeys(keys, name), indent=2) + "\n", encoding="utf-8")
