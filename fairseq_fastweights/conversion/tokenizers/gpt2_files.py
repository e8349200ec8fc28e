"""Byte-level BPEs in other files than tokenizer.json: GPT-2's vocab.json and merges.txt, and those of `--bpe gpt2`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.files.text_files import read_text
from fairseq_fastweights.invalid_input import InvalidInput

PIECES = ("encoder.json", "vocab.bpe")
"""The files of fairseq's `--bpe gpt2`."""

PAIR = ("vocab.json", "merges.txt")
"""GPT-2's files."""

END_OF_TEXT = "<|endoftext|>"

_PRINTABLE = frozenset(bytes_to_unicode().values())
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def read_pair(folder: Path) -> dict[str, Any]:
    """Reads GPT-2's files as the contents of a tokenizer.json; raises a `ValueError` if they do not say enough."""
    if (folder / "tokenizer_config.json").is_file():
        config = read_json(folder / "tokenizer_config.json")
        for name in ("add_prefix_space", "add_bos_token"):
            if config.get(name):
                raise InvalidInput(f"{folder / 'tokenizer_config.json'}: {name} is set; it must not be")
    path, others = folder / PAIR[0], folder / "added_tokens.json"
    ids = _read_ids(path)
    tokens = _read_ids(others) if others.is_file() else {}
    tokens |= {token: i for token, i in ids.items() if token == END_OF_TEXT}
    # GPT-NeoX's lists its runs of spaces as they are; only its tokenizer.json says that they are cut out first.
    strange = {piece for piece in ids.keys() - tokens.keys() if not set(piece) <= _PRINTABLE}
    if strange:
        raise InvalidInput(
            f"{path}: {len(strange)} pieces, {min(strange)!r} for one, are not written in characters for bytes; they "
            "must be among the added tokens, as tokenizer.json has them"
        )
    return _content(path, ids, folder / PAIR[1], tokens)


def read_pieces(folder: Path) -> dict[str, Any]:
    """Reads the files of `--bpe gpt2` as the contents of a tokenizer.json."""
    path = folder / PIECES[0]
    ids = {piece: i for piece, i in _read_ids(path).items() if set(piece) <= _PRINTABLE}
    return _content(path, ids, folder / PIECES[1], {})


def write_for_gpt2(folder: Path, content: dict[str, Any], end_of_text: int, vocabulary_size: int) -> None:
    """Writes encoder.json and vocab.bpe if fairseq's `--bpe gpt2` gives the ids of a tokenizer.

    Args:
        folder: gets the files.
        content: of the tokenizer.json, as the library writes it.
        end_of_text: the id of the token that ends texts, which may be an added one; it is nowhere within a text.
        vocabulary_size: of the model, which may draw more tokens than any text has.
    """
    model, splitter = content["model"], content["pre_tokenizer"] or {}
    # `--bpe gpt2` knows no added tokens, no normalizer, and only GPT-2's expression for splits.
    others = {entry["id"] for entry in content["added_tokens"]} - {end_of_text}
    splits = [splitter.get(name) for name in ("type", "add_prefix_space", "use_regex")] == ["ByteLevel", False, True]
    if others or content["normalizer"] or model["type"] != "BPE" or not splits:
        return
    added = {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    pieces = {piece: i for piece, i in (model["vocab"] | added).items() if set(piece) <= _PRINTABLE}
    ids = set(pieces.values())
    pieces |= {f"<|{i}|>": i for i in range(vocabulary_size) if i not in ids}
    (folder / PIECES[0]).write_text(json.dumps(pieces), encoding="ascii")
    # fairseq leaves out the first line and the text after the last line end.
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / PIECES[1]).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def added_token(token_id: int, content: str, *, special: bool = False) -> dict[str, Any]:
    """An entry of a tokenizer.json's added_tokens."""
    others = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **others, "special": special}


def tokenizer_file(model: dict[str, Any], added: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    """The contents of a tokenizer.json."""
    added = sorted(added, key=lambda entry: entry["id"])
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder")) | parts
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "model": model, **parts}


def is_id(value: Any) -> bool:
    """True if a value of a JSON file can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _content(path: Path, vocabulary: dict[str, int], merges: Path, added: dict[str, int]) -> dict[str, Any]:
    """The contents of the tokenizer.json; `path`: of the vocabulary, for messages."""
    pairs = _read_merges(merges)
    made = (*sorted(_PRINTABLE), *(first + second for first, second in pairs))
    if lacking := next((piece for piece in made if piece not in vocabulary), None):
        raise InvalidInput(f"{path}: it lacks the piece {lacking!r}, a byte or one that {merges.name} makes")
    # A token that is in the list of added ones alone would get the next id.
    model = {"type": "BPE", "vocab": added | vocabulary, "merges": pairs}
    entries = [added_token(i, token) for token, i in added.items()]
    return tokenizer_file(model, entries, pre_tokenizer=_BYTES, decoder=_BYTES)


def _read_ids(path: Path) -> dict[str, int]:
    """Reads the id of each piece."""
    content = read_json(path)
    for piece, value in content.items():
        if not is_id(value):
            raise InvalidInput(f"{path}: the number of {piece!r} is {str(value)[:200]}; it must be a whole number")
    return content


def _read_merges(path: Path) -> list[list[str]]:
    """Reads the pairs of pieces to join, in order."""
    lines = read_text(path).split("\n")
    lines = lines[1:-1] if path.name == PIECES[1] else lines[lines[0].startswith("#version") :]  # as fairseq reads it
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip()]
    if wrong := next((pair for pair in pairs if len(pair) != 2 or not all(pair)), None):
        raise InvalidInput(f"{path}: it holds {' '.join(wrong)[:200]!r}; each line must be two pieces")
    return pairs
