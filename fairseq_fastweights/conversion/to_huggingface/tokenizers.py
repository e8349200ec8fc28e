"""Makes tokenizers of `transformers` with the numbers of fairseq's dictionaries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fairseq_fastweights.conversion.files.folders import ORIGINALS, RECORD
from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.conversion.from_huggingface.published import original_files, source_mixers
from fairseq_fastweights.conversion.tokenizers import kept_settings, tokenizer_json
from fairseq_fastweights.conversion.tokenizers.byte_level_files import (
    END_OF_TEXT,
    PIECES,
    added_token,
    read_pieces,
    tokenizer_file,
)
from fairseq_fastweights.files.text_files import open_text
from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.huggingface.tokenization import WordTokenizer
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.models import checkpoint_settings

WORDS = "words"
"""In place of a tokenizer's folder, for a dictionary of words that are separated by spaces."""

# What stands for word types that no text has, where a byte-level BPE would take "<pad>" for a text.
_PADDING, _UNKNOWN = "<|fairseq:pad|>", "<|fairseq:unk|>"

# Of Python's str.split(), by which fairseq splits lines, and not of \s in the regular expressions of tokenizers.
_SPACES = r"[\s\x1c-\x1f\x85]+"


def find_pieces(dictionary: Path, nearby: Iterable[Path], given: str | Path | None = None) -> Path | None:
    """Finds the folder of the tokenizer whose numbers a dictionary has; None for a dictionary of words.

    Args:
        dictionary: the file.
        nearby: folders to search.
        given: the folder, or `WORDS`; None to search.

    Raises:
        ValueError: if the files are not in the given folder, or are not found and the dictionary's words are numbers.
    """
    if given is not None:
        if str(given) == WORDS:
            return None
        folder = Path(given)
        if _has(folder, tokenizer_json.FILES):
            return folder
        missing = [name for name in PIECES[:2] if not (folder / name).is_file()]
        if missing:
            raise InvalidInput(
                f"{folder}: {missing[0]} is missing; a tokenizer has {' and '.join(tokenizer_json.FILES)}, or "
                f"{' and '.join(PIECES[:2])}"
            )
        return folder
    for folder in nearby:
        if any(_has(folder, names) for names in (tokenizer_json.FILES, PIECES[:2])):
            return folder
    with open_text(dictionary) as lines:
        numbers = [line.split(" ")[0].isdecimal() for line, _ in zip(lines, range(1000), strict=False)]
    if numbers and sum(numbers) > 0.9 * len(numbers):
        raise InvalidInput(
            f"{dictionary}: these are numbers, as of the pieces of a BPE; --tokenizer names the folder with its "
            f"{' and '.join(tokenizer_json.FILES)}, or {' and '.join(PIECES[:2])}, or says {WORDS} if they are words"
        )
    return None


def make_tokenizer(
    dictionary: Dictionary, pieces: Path | None, config: FastWeightConfig, kept: Path | None = None
) -> PreTrainedTokenizerFast:
    """Makes the tokenizer of a model.

    A text begins as in fairseq, with the end of another text; of a model that `from-huggingface` made and that still
    has the mixers of its source, it is what the source's tokenizer makes of it, in other numbers.

    Args:
        dictionary: the model's dictionary.
        pieces: the result of `find_pieces`.
        config: the model's configuration.
        kept: the folder with the settings of the tokenizer that it came from; None if there is none.

    Raises:
        ValueError: if the BPE's pieces are not those of the dictionary, or a setting cannot be used; the message names
            the file.
    """
    named: dict[str, str] = {}
    if pieces is None:
        made = _of_words(dictionary)
    elif is_source(pieces, config):
        made, named = _of_source(dictionary, pieces)
    else:
        made = (_of_whole if _has(pieces, tokenizer_json.FILES) else _of_pieces)(dictionary, pieces)
    if not named:
        numbers = {"bos_token": config.bos_token_id, "eos_token": dictionary.eos()}
        named = {name: _name(made, number) for name, number in numbers.items()}
        made["post_processor"] = _begin_with(named["bos_token"], config.bos_token_id)
    settings: dict[str, Any] = {"padding_side": "left", "clean_up_tokenization_spaces": False}
    if kept is not None:
        words = {*made["model"]["vocab"], *(entry["content"] for entry in made["added_tokens"])}
        settings |= kept_settings.tokenizer_arguments(kept, words, named)
    kind: Any = WordTokenizer if pieces is None else PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = kind(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        pad_token=_name(made, dictionary.pad()),
        unk_token=_name(made, dictionary.unk()),
        model_input_names=["input_ids", "attention_mask"],
        **named,
        **settings,
    )
    return tokenizer


def is_source(pieces: Path | None, config: FastWeightConfig) -> bool:
    """True if a model is still the one that `from-huggingface` made, in the folder with its pieces, by its layers."""
    if pieces is None or not (pieces / RECORD).is_file():
        return False
    return checkpoint_settings.together(list(config.mixers or ())) == source_mixers(pieces)


def source_numbers(dictionary: Dictionary, path: Path) -> Callable[[int], int]:
    """The numbers in the dictionary of a source's word types, of which this file says which ends texts."""
    return _numbers(dictionary, tokenizer_json.read_end_of_text(path))


def _numbers(dictionary: Dictionary, end: int | None) -> Callable[[int], int]:
    return lambda own: dictionary.eos() if own == end else dictionary.index(str(own))


def _has(folder: Path, names: Iterable[str]) -> bool:
    return all((folder / name).is_file() for name in names)


def _of_whole(dictionary: Dictionary, folder: Path) -> dict[str, Any]:
    """The tokenizer in `folder`, with its numbers replaced by those of the dictionary."""
    path = folder / tokenizer_json.FILE
    made = read_json(path)
    tokenizer_json.open_tokenizer(path)  # from here on its parts are what they should be
    return _renumbered(made, dictionary, source_numbers(dictionary, folder / tokenizer_json.SETTINGS), path)


def _of_pieces(dictionary: Dictionary, folder: Path) -> dict[str, Any]:
    """The byte-level BPE in `folder`, of fairseq or an earlier conversion, likewise."""
    made, end = read_pieces(folder)
    words = made["model"]["vocab"]
    if end is None and dictionary.index(str(words.get(END_OF_TEXT))) == dictionary.unk():
        end = words.get(END_OF_TEXT)  # which no text has, where fairseq has </s>
    return _renumbered(made, dictionary, _numbers(dictionary, end), folder / PIECES[0])


def _of_source(dictionary: Dictionary, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tokenizer of the source in `folder`, as transformers reads it, with the dictionary's numbers.

    Also returns its special tokens at the beginning and the end of texts.
    """
    path = folder / ORIGINALS
    original_files(folder, ORIGINALS)  # none is a link to elsewhere
    try:
        source = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of many libraries
        raise InvalidInput(f"{path}: transformers cannot read this tokenizer ({str(error).splitlines()[0]})") from error
    made = json.loads(source.backend_tokenizer.to_str())
    number_of = source_numbers(dictionary, folder / RECORD)
    made["added_tokens"] = [x for x in made["added_tokens"] if number_of(x["id"]) != dictionary.unk()]
    _renumber_processor(made["post_processor"], number_of)
    made = _renumbered(made, dictionary, number_of, path)
    words = {name: getattr(source, name) for name in ("bos_token", "eos_token")}
    known = {entry["content"] for entry in made["added_tokens"]} | set(made["model"]["vocab"])
    named = {name: word for name, word in words.items() if word in known}
    return made, named or {"eos_token": _name(made, dictionary.eos())}


def _renumber_processor(part: Any, number_of: Callable[[int], int]) -> None:
    """Replaces the numbers of the words that are put around texts."""
    for inner in (part or {}).get("processors", ()):
        _renumber_processor(inner, number_of)
    for word in (part or {}).get("special_tokens", {}).values():
        word["ids"] = [number_of(number) for number in word["ids"]]
    for name in ("sep", "cls"):
        if name in (part or {}):
            part[name] = [part[name][0], number_of(part[name][1])]


def _renumbered(
    made: dict[str, Any], dictionary: Dictionary, number_of: Callable[[int], int], path: Path
) -> dict[str, Any]:
    """The tokenizer with other numbers, and words for padding and what is unknown."""
    model = made["model"]
    if model.get("type", "BPE") != "BPE":
        raise InvalidInput(f"{path}: model is {model.get('type')!r}; only 'BPE' is supported")
    model["vocab"] = {word: number_of(number) for word, number in model["vocab"].items()}
    made["added_tokens"] = tokenizer_json.read_added_tokens(path, made)
    for entry in made["added_tokens"]:
        entry["id"] = number_of(entry["id"])
    lacking = [word for word, number in model["vocab"].items() if number == dictionary.unk()]
    if lacking:  # transformers' tokenizers cannot make <unk> of a piece
        raise InvalidInput(
            f"{path}: dict.txt lacks {len(lacking)} of its words, {lacking[0]!r} for one; it must have all, as by "
            f"fairseq-preprocess --srcdict. With --tokenizer {WORDS} the numbers are the words, and texts are to be "
            "encoded before"
        )
    special = {_PADDING: dictionary.pad(), _UNKNOWN: dictionary.unk()}
    if dictionary.eos() not in (entry["id"] for entry in made["added_tokens"]):
        ending = (piece for piece, number in model["vocab"].items() if number == dictionary.eos())
        special[next(ending, dictionary[dictionary.eos()])] = dictionary.eos()
    made |= {"truncation": None, "padding": None}
    made["added_tokens"] += [added_token(number, name, special=True) for name, number in special.items()]
    made["added_tokens"].sort(key=lambda entry: entry["id"])
    # A word that is in the list of added ones alone would get the next number.
    model["vocab"] = {entry["content"]: entry["id"] for entry in made["added_tokens"]} | model["vocab"]
    return made


def _of_words(dictionary: Dictionary) -> dict[str, Any]:
    """A tokenizer of words between spaces; ends of lines become </s>, as in fairseq-preprocess."""
    special = [dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk()]
    end = dictionary[dictionary.eos()]
    return tokenizer_file(
        {
            "type": "WordLevel",
            "vocab": {symbol: number for number, symbol in enumerate(dictionary.symbols)},
            "unk_token": dictionary[dictionary.unk()],
        },
        [added_token(number, dictionary[number], special=True) for number in special],
        normalizer={"type": "Replace", "pattern": {"String": "\n"}, "content": f" {end} "},
        pre_tokenizer={"type": "Split", "pattern": {"Regex": _SPACES}, "behavior": "Removed", "invert": False},
    )


def _begin_with(name: str, number: Any) -> dict[str, Any]:
    """Puts a word type before a text."""
    first: dict[str, Any] = {"SpecialToken": {"id": name, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def _name(made: dict[str, Any], number: Any) -> str:
    return next(entry["content"] for entry in made["added_tokens"] if entry["id"] == number)
