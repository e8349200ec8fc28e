"""From a Hugging Face folder to one for fairseq, and back."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_fastweights.conversion import tokenizer as tokenizers
from fairseq_fastweights.conversion.families import Family, buffers, read_family
from fairseq_fastweights.conversion.folders import check_target, new_folder
from fairseq_fastweights.conversion.weight_files import WeightFiles, load_safely, read_json
from fairseq_fastweights.conversion.whole_tokenizer import read_whole_tokenizer
from fairseq_fastweights.mixers.registry import build_mixer
from fairseq_fastweights.models import checkpoint_settings, fast_weight_decoder, fast_weight_lm
from fairseq_fastweights.models.fast_weight_options import mixer_settings

_ORIGINALS = "huggingface"
_RECORD = "conversion.json"


def from_huggingface(source: Path, target: Path) -> str:
    """Makes a folder for fairseq of a Hugging Face folder with a language model of `families.FAMILIES`.

    In it are `model.pt`, a checkpoint of `fast_weight_lm` with softmax attention in all layers, in the types that the
    weights had; `options.txt`, those of fairseq-train for a model of its shape; `dict.txt`; for `--bpe` `encoder.json`,
    `vocab.bpe` and `byte_level.json`, or `tokenizer.json` and `tokenizer_words.json`; and, for the way back,
    `conversion.json` and the folder `huggingface`.

    Returns:
        The options of fairseq's commands that name the tokenizer.

    Raises:
        ValueError: for anything that is missing, broken, unsafe or unsupported, naming it, before anything is written.
        OSError: naming the target, if it cannot be written. Nothing is left of it.
    """
    check_target(target)
    if not source.is_dir():
        raise ValueError(f"{source}: SOURCE must be a folder, or a model's name on the hub")
    config = read_json(source / "config.json")
    family = read_family(config, set(), end_of_text=0)  # its settings, before files of gigabytes are opened
    tokenizer = tokenizers.read_tokenizer(source) if family.byte_level else read_whole_tokenizer(source)
    files = WeightFiles(source)
    family = read_family(config, set(files.shapes), end_of_text=tokenizer.end_of_text)
    tokenizer.check(family.vocabulary, family.end_of_text)
    names = [name for name in files.shapes if not buffers(name)]
    copied = family.tied and family.output_name in names
    expected = {weight.name: weight.shape for weight in family.weights}
    if copied:
        expected[family.output_name] = expected[family.input_name]
    check_weights(f"{source}: the weights do not fit config.json", {n: files.shapes[n] for n in names}, expected)
    if copied and not torch.equal(files.read(family.output_name), files.read(family.input_name)):
        raise ValueError(
            f"{source}: tie_word_embeddings is true in config.json, but {family.output_name} is not "
            f"{family.input_name}; one of them must change"
        )
    model: dict[str, Tensor] = {}
    for weight in family.weights:
        parts = weight.split(files.read(weight.name))
        model |= {name: part.contiguous().clone() for name, part in zip(weight.ours, parts, strict=True)}
    if family.tied:
        model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]

    with new_folder(target) as folder:
        try:
            with (folder / "model.pt").open("wb") as file:
                torch.save(_checkpoint(family, model), file)
        except RuntimeError as error:  # in which torch hides why the file could not be written
            raise OSError(f"model.pt: {error.__context__ or error}") from error
        words = family.words()
        # fairseq-preprocess and the tasks take the order of the lines; the numbers are counts, of which there are none.
        (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in words), encoding="ascii")
        tokenizer.write(folder, family.vocabulary, family.end_of_text)
        # Of a model with other mixers, to which the weights are to go.
        flags = family.flags(without=("softmax-attention-layers", "tokens-per-sample"))
        (folder / "options.txt").write_text(f"--arch=fast_weight_lm {' '.join(flags)}\n", encoding="ascii")
        (folder / _RECORD).write_text(json.dumps({"weights": sorted(names), "end_of_text": family.end_of_text}))
        (folder / _ORIGINALS).mkdir()
        for name in ("config.json", "generation_config.json", *tokenizers.FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / _ORIGINALS / name)
    return tokenizer.options(target, family.end_of_text)


def to_huggingface(source: Path, target: Path, checkpoint: Path | None = None) -> None:
    """Makes a Hugging Face folder of one that `from_huggingface` made.

    Args:
        source: the folder.
        target: the new folder: `model.safetensors`, in the checkpoint's types, `config.json` and the tokenizer's files
            as they were.
        checkpoint: of the same model, trained further; None for the folder's `model.pt`.

    Raises:
        ValueError: as for `from_huggingface`; and if the checkpoint has fast weights, which have no counterpart there.
        OSError: as for `from_huggingface`.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError("writing model.safetensors needs the package safetensors: pip install safetensors") from None

    check_target(target)
    if not (source / _RECORD).is_file():
        raise ValueError(f"{source}: SOURCE must be a folder that from-huggingface wrote; {_RECORD} is not there")
    record = read_json(source / _RECORD)
    names = record.get("weights")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{source / _RECORD}: weights must be a list of names")
    config = read_json(source / _ORIGINALS / "config.json")
    family = read_family(config, set(names), record.get("end_of_text"))
    path = source / "model.pt" if checkpoint is None else checkpoint
    model = _read_checkpoint(path, family)
    weights: dict[str, Tensor] = {}
    for weight in family.weights:
        weights[weight.name] = weight.join(tuple(model[name] for name in weight.ours)).contiguous().clone()
    if family.tied and family.output_name in names:
        weights[family.output_name] = weights[family.input_name].clone()

    with new_folder(target) as folder:
        try:
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"model.safetensors: {error}") from error
        for original in sorted((source / _ORIGINALS).iterdir()):
            shutil.copyfile(original, folder / original.name)
        _note_type(folder / "config.json", config, {weight.dtype for weight in weights.values()})


def check_weights(what: str, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Compares names and shapes.

    Raises:
        ValueError: with a table of all that are missing, left over, or of another shape.
    """
    rows = [
        (name, str(found.get(name, "missing")), str(expected.get(name, "nothing of this name")))
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if not rows:
        return
    table = [("weight", "found", "expected"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    raise ValueError("\n  ".join([f"{what} ({len(rows)} of {len(found.keys() | expected.keys())}):", *lines]))


def _configuration(family: Family) -> Any:
    """What fairseq-train makes of the options that the family's model has."""
    parser = options.get_training_parser("language_modeling")
    args = options.parse_args_and_arch(parser, [".", "--arch", "fast_weight_lm", *family.flags()])
    with warnings.catch_warnings():  # fairseq calls hydra in old ways that still work
        warnings.simplefilter("ignore", UserWarning)
        return convert_namespace_to_omegaconf(args)


def _settings(family: Family) -> Tensor:
    """The settings by which a checkpoint tells its model."""
    named = {name.replace("-", "_"): value for name, value in family.options.items()}
    model = fast_weight_lm.FastWeightLanguageModelConfig(**named)
    with torch.device("meta"):
        attention = build_mixer(
            "softmax", model.decoder_embed_dim, mixer_settings(model, model.decoder_attention_heads)
        )
    return checkpoint_settings.encode(
        fast_weight_decoder.describe(model, family.dictionary(), [("softmax", attention)])
    )


def _checkpoint(family: Family, model: dict[str, Tensor]) -> dict[str, Any]:
    """A checkpoint as fairseq 0.12 writes it, before the first update."""
    cfg = _configuration(family)
    model["decoder.version"] = torch.tensor([3.0])
    model[f"decoder.{checkpoint_settings.NAME}"] = _settings(family)
    history = {
        "criterion_name": "CrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model,
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "task_state": {},
    }


def _read_checkpoint(path: Path, family: Family) -> dict[str, Tensor]:
    """The model's weights, after checks that they are of this model."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such checkpoint")
    state = load_safely(path)
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not all(isinstance(weight, Tensor) for weight in model.values()):
        raise ValueError(f"{path}: this is not a checkpoint of fairseq's")
    try:
        checkpoint_settings.check(model, "decoder", _settings(family))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    expected = family.shapes_of_ours()
    if family.tied:
        expected["decoder.output_projection.weight"] = expected["decoder.embed_tokens.weight"]
    ignored = ("decoder.version", f"decoder.{checkpoint_settings.NAME}")
    found = {name: tuple(weight.shape) for name, weight in model.items() if name not in ignored}
    check_weights(f"{path}: the weights do not fit the model that was converted", found, expected)
    return model


def _note_type(path: Path, config: dict[str, Any], types: set[torch.dtype]) -> None:
    """Changes what config.json says of the weights' type, where they were trained in another."""
    if len(types) != 1:
        return
    name = str(types.pop()).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    if any(config[key] != name for key in keys):
        path.write_text(json.dumps(config | dict.fromkeys(keys, name), indent=2) + "\n", encoding="utf-8")
