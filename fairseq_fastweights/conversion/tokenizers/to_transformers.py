"""Makes tokenizers of `transformers` with the token ids of fairseq's dictionaries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fairseq_fastweights.conversion.files.folders import ORIGINALS, RECORD, files_in, original_mixers
from fairseq_fastweights.conversion.files.weight_files import first_line, read_json
from fairseq_fastweights.conversion.tokenizers import settings, tokenizer_json
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import (
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

# Names of special tokens that no text has; a byte-level BPE would take "<pad>" for a text.
_PADDING, _UNKNOWN = "<|fairseq:pad|>", "<|fairseq:unk|>"

# The spaces of Python's str.split(), by which fairseq splits lines; \s in tokenizers' expressions has fewer.
_SPACES = r"[\s\x1c-\x1f\x85]+"

_IdOf = Callable[[int], int]


def find_pieces(dictionary: Path, nearby: Iterable[Path], given: str | Path | None = None) -> Path | None:
    """Finds the folder of the tokenizer whose token ids a dictionary has; None for a dictionary of words.

    Args:
        dictionary: the file.
        nearby: folders to search.
        given: the folder, or `WORDS`; None to search.
    """
    either = f"{' and '.join(tokenizer_json.FILES)}, or {' and '.join(PIECES)}"
    if given is not None:
        if str(given) == WORDS:
            return None
        folder = Path(given)
        missing = [name for name in PIECES if not (folder / name).is_file()]
        if missing and not _has(folder, tokenizer_json.FILES):
            raise InvalidInput(f"{folder}: {missing[0]} is missing; a tokenizer has {either}")
        return folder
    for folder in nearby:
        if _has(folder, tokenizer_json.FILES) or _has(folder, PIECES):
            return folder
    with open_text(dictionary) as lines:
        numbers = [line.split(" ")[0].isdecimal() for line, _ in zip(lines, range(1000), strict=False)]
    if numbers and sum(numbers) > 0.9 * len(numbers):
        raise InvalidInput(
            f"{dictionary}: these are numbers, as of the pieces of a BPE; --tokenizer names the folder with its "
            f"{either}, or says {WORDS} if they are words"
        )
    return None


def make_tokenizer(
    dictionary: Dictionary, pieces: Path | None, config: FastWeightConfig, kept: Path | None = None
) -> PreTrainedTokenizerFast:
    """Makes the tokenizer of a model.

    A text begins as in fairseq, with the end of another text. A model that `from-huggingface` made and that still has
    its original mixers gets its original tokenizer, with other ids.

    Args:
        dictionary: the model's dictionary.
        pieces: the result of `find_pieces`.
        config: the model's configuration.
        kept: the folder with the settings of the tokenizer that it came from; None if there is none.
    """
    named: dict[str, str] = {}
    mixers = checkpoint_settings.together(list(config.mixers or ()))
    if pieces is None:
        made = _of_words(dictionary)
    elif (pieces / RECORD).is_file() and original_mixers(pieces) == mixers:
        made, named = _original(dictionary, pieces)
    elif _has(pieces, tokenizer_json.FILES):
        path = pieces / tokenizer_json.FILE
        made = read_json(path)
        tokenizer_json.open_tokenizer(path)  # checks all parts of the file
        made = _with_ids(made, dictionary, original_ids(dictionary, pieces / tokenizer_json.SETTINGS), path)
    else:
        made = read_pieces(pieces)
        end = made["model"]["vocab"].get(END_OF_TEXT)
        if dictionary.index(str(end)) != dictionary.unk():
            end = None  # a token as any other; without it in the dictionary, it is fairseq's </s>
        made = _with_ids(made, dictionary, _ids(dictionary, end), pieces / PIECES[0])
    # A tokenizer that is not the original one puts one token before texts, as fairseq's tasks do.
    if not named:
        ids = {"bos_token": config.bos_token_id, "eos_token": dictionary.eos()}
        named = {name: _name(made, token_id) for name, token_id in ids.items()}
        made["post_processor"] = _begin_with(named["bos_token"], config.bos_token_id)
    arguments: dict[str, Any] = {"padding_side": "left", "clean_up_tokenization_spaces": False}
    if kept is not None:
        known = {*made["model"]["vocab"], *(entry["content"] for entry in made["added_tokens"])}
        arguments |= settings.tokenizer_arguments(kept, known, named)
    kind: Any = WordTokenizer if pieces is None else PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = kind(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        pad_token=_name(made, dictionary.pad()),
        unk_token=_name(made, dictionary.unk()),
        model_input_names=["input_ids", "attention_mask"],
        **named,
        **arguments,
    )
    return tokenizer


def original_ids(dictionary: Dictionary, path: Path) -> _IdOf:
    """The ids in the dictionary of original token ids; this file has the id of the end-of-text token."""
    return _ids(dictionary, tokenizer_json.read_end_of_text(path))


def _ids(dictionary: Dictionary, end: int | None) -> _IdOf:
    return lambda own: dictionary.eos() if own == end else dictionary.index(str(own))


def _has(folder: Path, names: Iterable[str]) -> bool:
    return all((folder / name).is_file() for name in names)


def _original(dictionary: Dictionary, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The original tokenizer in `folder`, as transformers reads it, with the dictionary's ids.

    Also returns its special tokens at the beginning and the end of texts.
    """
    path = folder / ORIGINALS
    files_in(folder, within=ORIGINALS)  # none is a link to elsewhere
    try:
        original = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of many libraries
        raise InvalidInput(f"{path}: transformers cannot read this tokenizer ({first_line(error)})") from error
    made = json.loads(original.backend_tokenizer.to_str())
    id_of = original_ids(dictionary, folder / RECORD)
    made["added_tokens"] = [x for x in made["added_tokens"] if id_of(x["id"]) != dictionary.unk()]
    _set_ids(made["post_processor"] or {}, id_of)
    made = _with_ids(made, dictionary, id_of, path)
    tokens = {name: getattr(original, name) for name in ("bos_token", "eos_token")}
    known = {entry["content"] for entry in made["added_tokens"]} | set(made["model"]["vocab"])
    named = {name: token for name, token in tokens.items() if token in known}
    return made, named or {"eos_token": _name(made, dictionary.eos())}


def _set_ids(processor: dict[str, Any], id_of: _IdOf) -> None:
    """Replaces the ids of the tokens that a post-processor puts around texts."""
    for inner in processor.get("processors", ()):
        _set_ids(inner, id_of)
    for token in processor.get("special_tokens", {}).values():
        token["ids"] = list(map(id_of, token["ids"]))
    for name in {"sep", "cls"} & processor.keys():
        processor[name] = [processor[name][0], id_of(processor[name][1])]


def _with_ids(made: dict[str, Any], dictionary: Dictionary, id_of: _IdOf, path: Path) -> dict[str, Any]:
    """The tokenizer with other ids, and tokens for padding and unknown ones."""
    model = made["model"]
    if model.get("type", "BPE") != "BPE":
        raise InvalidInput(f"{path}: model is {model.get('type')!r}; only 'BPE' is supported")
    model["vocab"] = {token: id_of(token_id) for token, token_id in model["vocab"].items()}
    made["added_tokens"] = tokenizer_json.read_added_tokens(path, made)
    for entry in made["added_tokens"]:
        entry["id"] = id_of(entry["id"])
    lacking = [token for token, token_id in model["vocab"].items() if token_id == dictionary.unk()]
    if lacking:  # transformers' tokenizers cannot make <unk> of a piece
        raise InvalidInput(
            f"{path}: dict.txt lacks {len(lacking)} of its words, {lacking[0]!r} for one; it must have all, as by "
            f"fairseq-preprocess --srcdict. With --tokenizer {WORDS} the numbers are the words, and texts are to be "
            "encoded before"
        )
    # transformers wants tokens for padding and the unknown; the end of text may be a piece of the BPE.
    special = {_PADDING: dictionary.pad(), _UNKNOWN: dictionary.unk()}
    if dictionary.eos() not in (entry["id"] for entry in made["added_tokens"]):
        ending = (piece for piece, token_id in model["vocab"].items() if token_id == dictionary.eos())
        special[next(ending, dictionary[dictionary.eos()])] = dictionary.eos()
    made |= {"truncation": None, "padding": None}
    made["added_tokens"] += [added_token(token_id, name, special=True) for name, token_id in special.items()]
    made["added_tokens"].sort(key=lambda entry: entry["id"])
    # A token that is in the list of added ones alone would get the next id.
    model["vocab"] = {entry["content"]: entry["id"] for entry in made["added_tokens"]} | model["vocab"]
    return made


def _of_words(dictionary: Dictionary) -> dict[str, Any]:
    """A tokenizer of words between spaces; ends of lines become </s>, as in fairseq-preprocess."""
    special = [dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk()]
    end = dictionary[dictionary.eos()]
    return tokenizer_file(
        {
            "type": "WordLevel",
            "vocab": {symbol: token_id for token_id, symbol in enumerate(dictionary.symbols)},
            "unk_token": dictionary[dictionary.unk()],
        },
        [added_token(token_id, dictionary[token_id], special=True) for token_id in special],
        normalizer={"type": "Replace", "pattern": {"String": "\n"}, "content": f" {end} "},
        pre_tokenizer={"type": "Split", "pattern": {"Regex": _SPACES}, "behavior": "Removed", "invert": False},
    )


def _begin_with(name: str, token_id: Any) -> dict[str, Any]:
    """Puts a token before a text."""
    first: dict[str, Any] = {"SpecialToken": {"id": name, "type_id": 0}}
    text, second = ({"Sequence": {"id": part, "type_id": 0}} for part in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }


def _name(made: dict[str, Any], token_id: Any) -> str:
    return next(entry["content"] for entry in made["added_tokens"] if entry["id"] == token_id)
