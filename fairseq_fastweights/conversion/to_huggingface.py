"""Converts models that fairseq trained into Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from safetensors import SafetensorError
from torch import Tensor

from fairseq_fastweights.conversion.families.family import EMBEDDINGS, OUTPUT, Family
from fairseq_fastweights.conversion.families.settings import SCALINGS
from fairseq_fastweights.conversion.families.table import read_family
from fairseq_fastweights.conversion.files.checkpoints import configuration, read_state
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
from fairseq_fastweights.conversion.files.weight_files import check_weights, read_json, save_weights
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import FILES, PIECES
from fairseq_fastweights.conversion.trained_models import find_run, load_run
from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.huggingface.modeling import FastWeightForCausalLM
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling
from fairseq_fastweights.models import checkpoint_settings
from fairseq_fastweights.models.description import config_of, new_name

_DELTA = "gated-delta"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOT_COMPARED = {"dropout", "attention_dropout", "activation_dropout", "layerdrop", "adaptive_softmax_dropout"}
_NOT_COMPARED |= {"initializer_range", "use_cache", *_TOKENS}
_NOT_COMPARED |= {"hidden_act", "adaptive_input_factor", "adaptive_softmax_factor"}  # no effect: SwiGLU, no clusters
_NOT_COMPARED |= {"model_type", "keys_to_ignore_at_inference", "mixer_settings", "format_version"}
"""Settings without effect on the outputs, and those that are compared in another way."""


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
            _write_as(model_type, target, model, dictionary, made, run.pieces)
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
    # --end-of-text may have chosen another token than config.json has.
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


def _write_as(
    kind: str, target: Path, model: FastWeightForCausalLM, dictionary: Dictionary, tokenizer: Any, pieces: Path | None
) -> None:
    """Writes a folder with a model of one of transformers' classes.

    A model of a dictionary keeps its token ids. One whose vocabulary came from a Hugging Face folder, without fairseq's
    special tokens, gets that folder's ids and tokenizer back. `pieces` is the folder of the tokenizer.
    """
    # Only a model that masks fairseq's special symbols can lose their rows and keep its probabilities.
    source = pieces if model.config.masked_tokens and pieces is not None and (pieces / RECORD).is_file() else None
    settings = _settings(kind, model.config)
    originals: dict[str, Path] = {}
    if source is None:  # the vocabulary is fairseq's dictionary
        family = read_family(settings, set()).with_own_ids()
    else:
        end = read_json(source / RECORD).get("end_of_text")
        settings |= {"vocab_size": len(dictionary) - 3, "eos_token_id": end}
        family = read_family(settings, set())
        originals = files_in(source, within=ORIGINALS)
        given = read_json(originals.pop("config.json"))
        settings |= {name: given[name] for name in _TOKENS if name in given}
    _check_fits(kind, family, model.config, dictionary, masks=source is not None)
    own = model.state_dict()
    weights = family.join({name: own[new_name(name)] for name in family.model.parameters})
    classes = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config: Any = import_module("transformers").AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.architectures, config.dtype = [classes[kind]], model.config.dtype
    with new_folder(target) as folder:
        save_weights(folder, weights)
        config.save_pretrained(folder)
        if source is None:
            model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            _check_tokenizer(kind, folder, tokenizer)
        copy_files(originals, folder)


def _check_tokenizer(kind: str, folder: Path, tokenizer: Any) -> None:
    """Raises a `ValueError` if transformers reads tokenizers of this class otherwise than their files say."""
    read = import_module("transformers").AutoTokenizer.from_pretrained(folder)
    if not isinstance(tokenizer, type(read)):  # only this package decodes words between spaces in parts
        raise InvalidInput(
            f"--as is {kind}, of which transformers reads all tokenizers as {type(read).__name__}; this one is none"
        )


def _settings(kind: str, config: FastWeightConfig) -> dict[str, Any]:
    """The config.json of the class that is most like this model."""
    own, heads = _canonical(config), config.num_attention_heads
    assert isinstance(config.mixers, list)
    same = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
    same += " tie_word_embeddings attention_dropout bos_token_id eos_token_id pad_token_id"
    settings: dict[str, Any] = {
        "model_type": kind,
        **{name: getattr(config, name) for name in same.split()},
        "num_key_value_heads": own.get("kv_heads", heads),
        "rms_norm_eps": config.rms_norm_eps or 1e-6,
        "hidden_act": "silu",
    }
    if kind != "olmo_hybrid":
        settings["head_dim"] = own.get("head_dim", config.hidden_size // heads)
    if kind == "mistral":
        settings["sliding_window"] = None
    rotary = own.get("rotary_dim", 0)
    if kind == "olmo_hybrid" and not rotary:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": None}  # without any, 10,000 is the base
    else:
        parameters = {"rope_type": "default", "rope_theta": own.get("rotary_base") or 10000.0}
        if text := own.get("rotary_scaling"):
            name, _, numbers = text.partition(":")
            parameters |= {"rope_type": name, **dict(zip(SCALINGS[name], map(float, numbers.split(",")), strict=True))}
        if kind == "qwen3_5_text":
            # No part is not allowed; a model without rotary embeddings then differs in rotary_dim.
            parameters["partial_rotary_factor"] = max(rotary, 2) / settings["head_dim"]
        settings["rope_parameters"] = parameters
    if kind in ("olmo_hybrid", "qwen3_5_text"):
        linear = {"num_key_heads": "key_heads", "key_head_dim": "key_dim", "value_head_dim": "value_dim"}
        linear |= {"conv_kernel_dim": "conv"}
        settings |= {f"linear_{name}": own.get(f"gated_delta_{option}", 1) for name, option in linear.items()}
        settings["linear_num_value_heads"] = own.get("fast_weight_heads", 1)
        kinds = ["linear_attention" if mixer == _DELTA else "full_attention" for mixer in config.mixers]
        settings["layer_types"] = kinds
    if kind == "olmo_hybrid":
        settings["linear_allow_neg_eigval"] = own.get("gated_delta_negative_eigenvalues", True)
    return settings


def _check_fits(kind: str, family: Family, config: FastWeightConfig, dictionary: Dictionary, *, masks: bool) -> None:
    """Raises a `ValueError` that lists the settings in which a class differs from a model, if there are any."""
    # Both as FastWeightConfig: the class as it would be read back, and the model.
    theirs = config_of(configuration(family.options | {"mask-special-symbols": masks}).model, dictionary)
    names = sorted(set(FastWeightConfig.__annotations__) - _NOT_COMPARED)
    pairs = {name: (getattr(config, name), getattr(theirs, name)) for name in names}
    if config.mixers == theirs.mixers:
        ours, other = _canonical(config), _canonical(theirs)
        pairs |= {name: (ours.get(name), other.get(name)) for name in sorted({*ours, *other} - {"backend"})}
    different = [
        f"{name} is {mine!r}, of {kind} {its!r}"
        for name, (mine, its) in pairs.items()
        if (parse_scaling(mine) != parse_scaling(its) if name == "rotary_scaling" else mine != its)
    ]
    if different:
        raise InvalidInput(f"--as is {kind}; a model of this class differs in {len(different)}: {'; '.join(different)}")


def _canonical(config: FastWeightConfig) -> dict[str, Any]:
    """The settings of mixers, in which a 0 that stands for a default is replaced by its value."""
    settings = dict(config.mixer_settings or {})
    heads = config.num_attention_heads
    settings["fast_weight_heads"] = settings.get("fast_weight_heads") or heads
    size = config.hidden_size // settings["fast_weight_heads"]
    filled = {"kv_heads": heads, "head_dim": config.hidden_size // heads, "gated_delta_key_dim": size}
    filled |= {"gated_delta_value_dim": size, "gated_delta_key_heads": settings["fast_weight_heads"]}
    settings |= {name: value for name, value in filled.items() if settings.get(name) == 0}
    if _DELTA not in (config.mixers or ()):
        del settings["fast_weight_heads"]
    if settings.get("rotary_dim") == 0:
        settings |= {"rotary_base": None, "rotary_scaling": ""}
    return settings
