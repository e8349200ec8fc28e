"""The tokenizer of a Hugging Face folder, for `--bpe tokenizer_json`, which the library `tokenizers` runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.files.text_files import read_text
from fairseq_fastweights.invalid_input import InvalidInput

FILE, SETTINGS = "tokenizer.json", "tokenizer_words.json"
FILES = (FILE, SETTINGS)
"""The files: the tokenizer, and the id of its end-of-text token, {"end_of_text": id}."""

PIECES = ("encoder.json", "vocab.bpe")
"""The files of fairseq's `--bpe gpt2`."""

PAIR = ("vocab.json", "merges.txt")
"""GPT-2's files."""

END_OF_TEXT = "<|endoftext|>"

_PRINTABLE = frozenset(bytes_to_unicode().values())
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

_IDS = range(2**31)
_MOST_SPARE = 1024
"""The largest number of vocabulary entries that a model may have beyond its tokenizer's, to pad its matrices."""


@dataclass(frozen=True)
class WholeTokenizer:
    """Any tokenizer that the package `tokenizers` reads.

    Args:
        text: its tokenizer.json.
        content: the same as the library writes it.
        source: name of the file.
        size: one more than the largest token id.
        added: ids of the added tokens.
        end_of_text: id of the end-of-text token in its configuration; None if there is none.
    """

    text: str
    content: dict[str, Any]
    source: str
    size: int
    added: dict[str, int]
    end_of_text: int | None

    def check(self, vocabulary_size: int, end_of_text: int) -> None:
        """Raises a `ValueError` if no model with this vocabulary and end-of-text token can have this tokenizer."""
        if not self.size <= vocabulary_size <= self.size + _MOST_SPARE:
            raise InvalidInput(
                f"{self.source}: the tokenizer has {self.size} entries, but the model, in config.json's vocab_size, "
                f"{vocabulary_size}; it must be as many, or up to {_MOST_SPARE} more, as padding"
            )
        if end_of_text not in self.added.values():
            raise InvalidInput(
                f"config.json: eos_token_id is {end_of_text}, which in {self.source} is no added token; it must be one"
            )

    def write(self, folder: Path, vocabulary_size: int, end_of_text: int) -> None:
        """Writes the files that `--bpe tokenizer_json` reads, and of a BPE like GPT-2's those of `--bpe gpt2`."""
        (folder / FILE).write_text(self.text, encoding="utf-8", newline="")
        (folder / SETTINGS).write_text(json.dumps({"end_of_text": end_of_text}), encoding="ascii")
        # `--bpe gpt2` knows no added tokens but the end of text, which no text has, no normalizer, and only GPT-2's
        # expression for splits.
        model, splitter = self.content["model"], self.content["pre_tokenizer"] or {}
        others = {entry["id"] for entry in self.content["added_tokens"]} - {end_of_text}
        splits = [splitter.get(name) for name in ("type", "add_prefix_space", "use_regex")] == [
            "ByteLevel",
            False,
            True,
        ]
        if others or self.content["normalizer"] or model["type"] != "BPE" or not splits:
            return
        added = {entry["content"]: entry["id"] for entry in self.content["added_tokens"]}
        pieces = {piece: i for piece, i in (model["vocab"] | added).items() if set(piece) <= _PRINTABLE}
        ids = set(pieces.values())
        pieces |= {f"<|{i}|>": i for i in range(vocabulary_size) if i not in ids}
        (folder / PIECES[0]).write_text(json.dumps(pieces), encoding="ascii")
        # fairseq leaves out the first line and the text after the last line end.
        lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
        (folder / PIECES[1]).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def read_whole_tokenizer(folder: Path, byte_level: bool = False) -> WholeTokenizer:
    """Reads `tokenizer.json`, and the end-of-text token from `tokenizer_config.json`.

    Args:
        folder: the folder.
        byte_level: whether `vocab.json` and `merges.txt`, of a BPE like GPT-2's, are enough where there is none.
    """
    path = folder / FILE
    if not byte_level or path.is_file():
        read_added_tokens(path, read_json(path))
        text = read_text(path)
    elif all((folder / name).is_file() for name in PAIR):
        path = folder / PAIR[0]
        text = json.dumps(read_pair(folder))
    else:
        raise InvalidInput(f"{folder}: there is no tokenizer; it must hold {FILE}, or {' and '.join(PAIR)}")
    tokenizer = open_tokenizer(path, text)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise InvalidInput(f"{path}: the tokenizer has no tokens")
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    end = config.get("eos_token")
    token = end.get("content") if isinstance(end, dict) else end  # older files describe it further
    content = json.loads(tokenizer.to_str())
    return WholeTokenizer(
        text=text,
        content=content,
        source=path.name,
        size=1 + max(ids.values()),
        added={entry["content"]: entry["id"] for entry in content["added_tokens"]},
        end_of_text=ids.get(token if isinstance(token, str) else END_OF_TEXT),
    )


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


def read_end_of_text(path: Path) -> int:
    """Reads the id of the end-of-text token in a file that `from-huggingface` wrote, or raises a `ValueError`."""
    value: Any = read_json(path).get("end_of_text")
    if type(value) is not int or value not in _IDS:
        raise InvalidInput(f"{path}: end_of_text is {str(value)[:200]}; it must be a whole number")
    return int(value)


def added_token(token_id: int, content: str, *, special: bool = False) -> dict[str, Any]:
    """An entry of a tokenizer.json's added_tokens."""
    others = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **others, "special": special}


def tokenizer_file(model: dict[str, Any], added: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    """The contents of a tokenizer.json."""
    added = sorted(added, key=lambda entry: entry["id"])
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder")) | parts
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "model": model, **parts}


def read_added_tokens(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads the added tokens of a tokenizer.json, each with its content and id, or raises a `ValueError`."""
    entries = content.get("added_tokens") or []
    if not isinstance(entries, list):
        raise InvalidInput(f"{path}: added_tokens is {str(entries)[:200]}; it must be a list")
    for entry in entries:
        token, value = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not isinstance(token, str) or not token or type(value) is not int or value not in _IDS:
            raise InvalidInput(f"{path}: added_tokens holds {str(entry)[:200]}; it must have a content and an id")
    return entries


def open_tokenizer(path: Path, text: str | None = None) -> Any:
    """Opens the tokenizer in a file, or with this text in its place, without truncation, padding and dropout."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InvalidInput(f"{path}: reading it needs the package tokenizers: pip install tokenizers") from None
    text = read_text(path) if text is None else text
    try:
        tokenizer = Tokenizer.from_str(text)
    except BaseException as error:  # Rust's panics are no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise InvalidInput(f"{path}: this is no tokenizer ({' '.join(str(error).split())[:200]})") from None
    tokenizer.no_truncation()  # files keep the settings of their last use
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # it would make the pieces random
    return tokenizer


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
        if type(value) is not int or value not in _IDS:
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
