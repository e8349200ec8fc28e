"""Settings of a Hugging Face folder's tokenizer and of generation, beside the pieces: chat templates and token ids.

`from-huggingface` keeps the files in the subfolder `ORIGINALS` of its folder, and `to-huggingface` reads them there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from fairseq_fastweights.conversion.files.folders import ORIGINALS, RECORD, TEMPLATE, file_in, files_in
from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.files.text_files import read_text
from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.invalid_input import InvalidInput, check_number

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE)
"""The files that are read, besides further chat templates."""

_PLAIN: dict[str, Callable[[Any], bool]] = {
    "model_max_length": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "padding_side": lambda value: value in ("left", "right"),
    "truncation_side": lambda value: value in ("left", "right"),
    "clean_up_tokenization_spaces": lambda value: isinstance(value, bool),
    "split_special_tokens": lambda value: isinstance(value, bool),
}
"""Settings of tokenizers that name no tokens, and checks of their values."""

_NAMED = ("cls_token", "sep_token", "mask_token")
_OTHERS = ("additional_special_tokens", "extra_special_tokens")

_GENERATION = {
    "do_sample": ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    "num_beams": ("num_beams", "early_stopping", "length_penalty"),
    "": (
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("do_sample", "repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("num_return_sequences", "renormalize_logits", "remove_invalid_values"),
    ),
}
"""The settings of generation, by the one without which they have no effect, and with which transformers saves them."""

TOKEN_IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")
"""Settings of generation that hold token ids."""


def find_kept(places: Iterable[Path]) -> Path | None:
    """The folder with the files in the first of these places that has one, from either conversion."""
    for place in places:
        config = file_in(place, f"{ORIGINALS}/{FILES[0]}")
        if config and (file_in(place, RECORD) or read_json(config).get("model_type") == FastWeightConfig.model_type):
            return place / ORIGINALS
    return None


def tokenizer_arguments(folder: Path, known: Iterable[str], own: dict[str, str]) -> dict[str, Any]:
    """The arguments of a tokenizer of transformers that a folder's files give.

    Args:
        folder: the folder.
        known: the tokens of the tokenizer; special tokens that are not among them are left out.
        own: the tokenizer's `bos_token` and `eos_token`; chat templates read the folder's, where it has others.
    """
    path = folder / "tokenizer_config.json"
    config, older = _read(folder, path.name), _read(folder, "special_tokens_map.json")
    arguments: dict[str, Any] = {}
    for name, fits in _PLAIN.items():
        if (value := config.get(name)) is not None:
            if not fits(value):
                raise InvalidInput(f"{path}: {name} is {value!r}; this is no value of this setting")
            arguments[name] = value
    # Older folders have special tokens in special_tokens_map.json alone.
    words, tokens = set(known), {**older, **config}
    arguments |= {name: word for name in _NAMED if (word := _word(tokens.get(name))) in words}
    listed = [entry for name in _OTHERS for entry in _list(tokens.get(name))]
    if others := sorted({word for entry in listed if (word := _word(entry)) in words}):
        arguments["extra_special_tokens"] = others
    other = {name: word for name in own if (word := _word(tokens.get(name))) not in (None, own[name])}
    if templates := read_templates(folder, config):
        templates = {name: _with_words(template, other) for name, template in templates.items()}
        arguments["chat_template"] = templates["default"] if set(templates) == {"default"} else templates
    return arguments


def read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name, in files of their own or else in this tokenizer_config.json."""
    files = files_in(folder, (TEMPLATE,))
    found = {"default" if file == TEMPLATE else Path(file).stem: read_text(folder / file) for file in files}
    given = config.get("chat_template")
    if found or given is None:
        return found
    if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        given = {entry.get("name"): entry.get("template") for entry in given}
    templates = {"default": given} if isinstance(given, str) else given
    if not isinstance(templates, dict) or not all(isinstance(x, str) for pair in templates.items() for x in pair):
        raise InvalidInput(
            f"{folder}/tokenizer_config.json: chat_template must be a text, or a list of names and texts"
        )
    return templates


def generation_config(
    folder: Path | None, config: FastWeightConfig, id_of: Callable[[int], int | None]
) -> GenerationConfig:
    """The settings of generation of a model, with those of the folder that it came from.

    Args:
        folder: the folder; None if there is none.
        config: of the model.
        id_of: from a token id of the folder to the id in the model; None if it has none.
    """
    values: dict[str, Any] = {}
    ends: list[Any] = []
    path = Path() if folder is None else folder / "generation_config.json"
    if folder is not None:
        given = _read(folder, path.name)
        # A setting without effect, such as a temperature without sampling, is an error of transformers' validation.
        for needed, names in _GENERATION.items():
            set_to = given.get(needed)
            if not needed or set_to is True or (isinstance(set_to, int) and set_to > 1):
                values |= {name: given[name] for name in names if given.get(name) is not None}
        values |= {name: _with_ids(given[name], id_of) for name in TOKEN_IDS if given.get(name) is not None}
        ends = _list(_with_ids(given.get("eos_token_id", _read(folder, FILES[0]).get("eos_token_id")), id_of))
    for name, value in values.items():
        for number in _list(value):
            if isinstance(number, float):
                check_number(f"{path}: {name}", number)
    ends = list(dict.fromkeys([*_list(config.eos_token_id), *ends]))
    # fairseq's generator never writes padding.
    values["suppress_tokens"] = list(dict.fromkeys([config.pad_token_id, *_list(values.get("suppress_tokens"))]))
    values["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    try:
        kind: Any = GenerationConfig
        made: GenerationConfig = kind(bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id, **values)
        made.validate(strict=True)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{path}: {' '.join(str(error).split())[:300]}") from None
    return made


def _read(folder: Path, name: str) -> dict[str, Any]:
    """A file of the folder; {} if it is not there."""
    path = file_in(folder, name)
    return {} if path is None else read_json(path)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _word(token: Any) -> str | None:
    """The text of a special token, which some files describe with further settings."""
    word = token.get("content") if isinstance(token, dict) else token
    return word if isinstance(word, str) else None


def _with_words(template: str, other: dict[str, str]) -> str:
    """A template in which the special tokens are these, independent of the tokenizer's."""
    tokens = {name: json.dumps(word, ensure_ascii=False) for name, word in other.items() if name in template}
    return "".join(f"{{% set {name} = {word} %}}\n" for name, word in tokens.items()) + template


def _with_ids(value: Any, id_of: Callable[[int], int | None]) -> Any:
    """An id, or ids in lists, in the model; those that it does not have are left out."""
    if isinstance(value, list):
        ids = [_with_ids(one, id_of) for one in value]
        return [one for one in ids if one is not None]
    return id_of(value) if isinstance(value, int) and not isinstance(value, bool) else None
