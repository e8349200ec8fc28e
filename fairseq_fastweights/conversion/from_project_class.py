"""Converts folders with the project's class, also after more training in transformers, back for fairseq."""

from __future__ import annotations

from pathlib import Path

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_fastweights.conversion.files.checkpoints import build_on_meta, configuration, write_checkpoint
from fairseq_fastweights.conversion.files.folders import (
    FOR_FAIRSEQ,
    ORIGINALS,
    check_target,
    copy_files,
    file_in,
    files_in,
    new_folder,
    path_of,
)
from fairseq_fastweights.conversion.files.weight_files import WeightFiles, check_weights, read_json
from fairseq_fastweights.conversion.from_huggingface import check_layers
from fairseq_fastweights.conversion.tokenizers import settings, tokenizer_json
from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.description import new_name, options_of
from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel


def from_project_class(source: Path, target: Path) -> str | None:
    """Makes a folder for fairseq: `model.pt`, `dict.txt` and the files of a tokenizer, if there is one.

    The settings of the tokenizer and of generation, with chat templates, go to its folder `huggingface`.

    Args:
        source: the folder, with `fairseq/dict.txt`.
        target: the new folder.

    Raises:
        ValueError: if a file is missing or cannot be used; nothing is written then.
        OSError: if the target cannot be written; nothing is left of it.
    """
    source, target = path_of("source", source), path_of("target", target)
    check_target(target)
    names = ("dict.txt", *tokenizer_json.PIECES, *tokenizer_json.FILES)
    copied = {name: path for name in names if (path := file_in(source, f"{FOR_FAIRSEQ}/{name}"))}
    copied |= {f"{ORIGINALS}/{name}": path for name, path in files_in(source, settings.FILES).items()}
    config = _read_config(source / "config.json")
    dictionary = _read_dictionary(source / FOR_FAIRSEQ / "dict.txt", config)
    files = WeightFiles(source)
    check_layers(source, {"num_hidden_layers": config.num_hidden_layers}, len(files.shapes))
    cfg = configuration(options_of(config))
    model = build_on_meta(cfg, dictionary)
    weights = _read_weights(source, files, model)
    # Buffers of fairseq's that no file of transformers has.
    for name, buffer in model.state_dict().items():
        if name not in weights:
            weights[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)  # fairseq's `_float_tensor`
    if model.decoder.adaptive_softmax is not None:
        weights["decoder.adaptive_softmax.version"] = torch.tensor([1])
    recorded = checkpoint_settings.settings_of(cfg.model, model.decoder.mixer_names, dictionary)

    with new_folder(target) as folder:
        write_checkpoint(folder / "model.pt", cfg, weights, recorded)
        copy_files(copied, folder)
    if (target / tokenizer_json.SETTINGS).is_file():
        return f"--bpe tokenizer_json --tokenizer-json-folder {target}"
    encoder, merges = (target / name for name in tokenizer_json.PIECES)
    return f"--bpe gpt2 --gpt2-encoder-json {encoder} --gpt2-vocab-bpe {merges}" if encoder.is_file() else None


def _read_config(path: Path) -> FastWeightConfig:
    content = read_json(path)
    try:
        return FastWeightConfig(**content)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{path}: {error}") from error


def _read_dictionary(path: Path, config: FastWeightConfig) -> Dictionary:
    if not path.is_file():
        raise InvalidInput(f"{path}: there is no such file; the weights belong to the words in it")
    try:
        dictionary = Dictionary.load(str(path))
    except (ValueError, RuntimeError) as error:
        raise InvalidInput(f"{path}: this is not a dictionary of fairseq's ({' '.join(str(error).split())})") from error
    if len(dictionary) != config.vocab_size:
        raise InvalidInput(
            f"{path}: it has {len(dictionary)} entries, the four special ones included; vocab_size in config.json "
            f"is {config.vocab_size}"
        )
    return dictionary


def _read_weights(source: Path, files: WeightFiles, model: FastWeightLanguageModel) -> dict[str, Tensor]:
    """Reads the weights, by fairseq's names; of tied weights the files hold one, or several that are equal."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameters |= {name: x for name, x in model.named_buffers() if name.endswith(".feature_map.features")}
    # Names of tied weights are one parameter; files hold one of them, or several.
    tied: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        tied.setdefault(id(parameter), []).append(name)
    held = [[new_name(name) for name in names if new_name(name) in files.shapes] for names in tied.values()]
    expected = {
        name: tuple(parameters[names[0]].shape)
        for names, there in zip(tied.values(), held, strict=True)
        for name in there or [new_name(names[0])]
    }
    check_weights(f"{source}: the weights do not fit config.json", files.shapes, expected)
    weights: dict[str, Tensor] = {}
    for names, there in zip(tied.values(), held, strict=True):
        try:
            weight, *others = map(files.read, there)
        except ValueError as error:
            raise InvalidInput(f"{source}: {error}") from None
        for other, copy in zip(there[1:], others, strict=True):
            if not torch.equal(copy, weight):
                raise InvalidInput(f"{source}: config.json ties {other} to {there[0]}, which is not equal to it")
        weights |= dict.fromkeys(names, weight)
    return weights
