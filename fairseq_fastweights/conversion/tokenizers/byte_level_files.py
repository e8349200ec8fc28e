"""Byte-level BPEs in other files than tokenizer.json: GPT-2's vocab.json and merges.txt, and those of fairseq.

`--bpe gpt2` reads encoder.json and vocab.bpe. With byte_level.json they are all that earlier conversions have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.files.text_files import read_text
from fairseq_fastweights.invalid_input import InvalidInput

PIECES = ("encoder.json", "vocab.bpe", "byte_level.json")
"""The files of an earlier conversion; without the last they are those of `--bpe gpt2`."""

PAIR = ("vocab.json", "merges.txt")
"""GPT-2's files."""

END_OF_TEXT = "<|endoftext|>"

_PRINTABLE = frozenset(bytes_to_unicode().values())
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def read_pair(folder: Path) -> dict[str, Any]:
    """Reads GPT-2's files as the contents of a tokenizer.json.

    Raises:
        ValueError: if they hold something else, or do not say enough; the message names the file.
    """
    if (folder / "tokenizer_config.json").is_file():
        config = read_json(folder / "tokenizer_config.json")
        for name in ("add_prefix_space", "add_bos_token"):
            if config.get(name):
                raise InvalidInput(f"{folder / 'tokenizer_config.json'}: {name} is set; it must not be")
    path, others = folder / PAIR[0], folder / "added_tokens.json"
    numbers = _read_numbers(path)
    words = _read_numbers(others) if others.is_file() else {}
    words |= {word: number for word, number in numbers.items() if word == END_OF_TEXT}
    # GPT-NeoX's lists its runs of spaces as they are; only its tokenizer.json says that they are cut out first.
    strange = {piece for piece in numbers.keys() - words.keys() if not set(piece) <= _PRINTABLE}
    if strange:
        raise InvalidInput(
            f"{path}: {len(strange)} pieces, {min(strange)!r} for one, are not written in characters for bytes; they "
            "must be among the added tokens, as tokenizer.json has them"
        )
    return _content(path, numbers, folder / PAIR[1], [added_token(number, word) for word, number in words.items()])


def read_pieces(folder: Path) -> tuple[dict[str, Any], int | None]:
    """Reads an earlier conversion's files as the contents of a tokenizer.json.

    Returns:
        These, and the number of the token that ends texts; None if there is no byte_level.json.

    Raises:
        ValueError: if a file is missing or holds something else; the message names it.
    """
    path = folder / PIECES[0]
    numbers, settings = _read_numbers(path), _read_settings(folder / PIECES[2])
    end, known = settings["end_of_text"], settings["vocabulary"]
    known = None if known is None else set(known)
    vocabulary = {
        piece: number
        for piece, number in numbers.items()
        if set(piece) <= _PRINTABLE and (known is None or number in known)
    }
    added = [
        added_token(number, entry["word"], special=True)
        if (number := entry["number"]) == end
        else added_token(number, entry["word"], special=bool(entry.get("special")), normalized=entry["normalized"])
        for entry in settings["added"] or ()
    ]
    normalizer = None if settings["normalizer"] is None else {"type": settings["normalizer"]}
    return _content(path, vocabulary, folder / PIECES[1], added, normalizer), end


def write_for_gpt2(folder: Path, content: dict[str, Any], end_of_text: int, vocabulary_size: int) -> None:
    """Writes encoder.json and vocab.bpe if fairseq's `--bpe gpt2` gives the numbers of a tokenizer.

    Args:
        folder: gets the files.
        content: of the tokenizer.json, as the library writes it.
        end_of_text: the number of the token that ends texts, which may be an added one; a text has it nowhere.
        vocabulary_size: number of word types of the model, which may draw more than any text has.
    """
    model, splitter = content["model"], content["pre_tokenizer"] or {}
    others = {entry["id"] for entry in content["added_tokens"]} - {end_of_text}
    splits = [splitter.get(name) for name in ("type", "add_prefix_space", "use_regex")] == ["ByteLevel", False, True]
    if others or content["normalizer"] or model["type"] != "BPE" or not splits:
        return
    pieces = {piece: number for piece, number in model["vocab"].items() if set(piece) <= _PRINTABLE}
    pieces |= {
        entry["content"]: entry["id"] for entry in content["added_tokens"] if set(entry["content"]) <= _PRINTABLE
    }
    numbers = set(pieces.values())
    pieces |= {f"<|{number}|>": number for number in range(vocabulary_size) if number not in numbers}
    (folder / PIECES[0]).write_text(json.dumps(pieces), encoding="ascii")
    # fairseq leaves out the first line and what comes after the last line end.
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / PIECES[1]).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def added_token(number: int, content: str, *, special: bool = False, normalized: bool = False) -> dict[str, Any]:
    """An entry of a tokenizer.json's added_tokens."""
    others = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": number, "content": content, **others, "normalized": normalized, "special": special}


def tokenizer_file(model: dict[str, Any], added: Iterable[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    """The contents of a tokenizer.json."""
    added = sorted(added, key=lambda entry: entry["id"])
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder")) | parts
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "model": model, **parts}


def is_number(value: Any) -> bool:
    """True if a value of a JSON file can be the number of a word type."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _content(
    path: Path, vocabulary: dict[str, int], merges: Path, added: list[dict[str, Any]], normalizer: Any = None
) -> dict[str, Any]:
    """The contents of the tokenizer.json; `path`: of the vocabulary, for messages."""
    pairs = _read_merges(merges)
    made = (*sorted(_PRINTABLE), *(first + second for first, second in pairs))
    if lacking := next((piece for piece in made if piece not in vocabulary), None):
        raise InvalidInput(f"{path}: it lacks the piece {lacking!r}, a byte or one that {merges.name} makes")
    # A word that is in the list of added ones alone would get the next number.
    words = {entry["content"]: entry["id"] for entry in added}
    model = {"type": "BPE", "vocab": words | vocabulary, "merges": pairs}
    return tokenizer_file(model, added, normalizer=normalizer, pre_tokenizer=_BYTES, decoder=_BYTES)


def _read_numbers(path: Path) -> dict[str, int]:
    """Reads the number of each piece."""
    content = read_json(path)
    for piece, number in content.items():
        if not is_number(number):
            raise InvalidInput(f"{path}: the number of {piece!r} is {str(number)[:200]}; it must be a whole number")
    return content


def _read_merges(path: Path) -> list[list[str]]:
    """Reads the pairs of pieces to join, in order."""
    lines = read_text(path).split("\n")
    lines = lines[1:-1] if path.name == PIECES[1] else lines[lines[0].startswith("#version") :]  # as fairseq reads it
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip()]
    if wrong := next((pair for pair in pairs if len(pair) != 2 or not all(pair)), None):
        raise InvalidInput(f"{path}: it holds {' '.join(wrong)[:200]!r}; each line must be two pieces")
    return pairs


def _read_settings(path: Path) -> dict[str, Any]:
    """Reads byte_level.json; without it nothing is set."""
    content = read_json(path) if path.is_file() else {"added": []}
    settings = {name: content.get(name) for name in ("normalizer", "end_of_text", "vocabulary", "added")}
    vocabulary, added = settings["vocabulary"], settings["added"]
    right = {
        "normalizer": settings["normalizer"] in (None, "NFC"),
        "end_of_text": is_number(settings["end_of_text"]),
        "vocabulary": isinstance(vocabulary, list) and all(map(is_number, vocabulary)),
        "added": isinstance(added, list) and all(map(_is_added, added)),
    }
    wrong = next((name for name in right if not right[name]), None)
    if path.is_file() and wrong is not None:
        raise InvalidInput(f"{path}: {wrong} is {str(settings[wrong])[:200]}; it must be as from-huggingface writes it")
    return settings


def _is_added(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("word"), str)
        and entry["word"] != ""
        and is_number(entry.get("number"))
        and isinstance(entry.get("normalized"), bool)
    )
