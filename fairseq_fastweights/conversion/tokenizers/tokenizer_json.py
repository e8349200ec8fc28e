"""The tokenizer of a Hugging Face folder, for `--bpe tokenizer_json`, which the library `tokenizers` runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.conversion.tokenizers.gpt2_files import (
    END_OF_TEXT,
    PAIR,
    PIECES,
    is_id,
    read_pair,
    write_for_gpt2,
)
from fairseq_fastweights.files.text_files import read_text
from fairseq_fastweights.invalid_input import InvalidInput

FILE, SETTINGS = "tokenizer.json", "tokenizer_words.json"
FILES = (FILE, SETTINGS)
"""The files: the tokenizer, and the id of its end-of-text token, {"end_of_text": id}."""

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
        write_for_gpt2(folder, self.content, end_of_text, vocabulary_size)


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


def tokenizer_options(folder: Path) -> str | None:
    """The options of fairseq's commands that name a converted folder's tokenizer; None if it has none."""
    if (folder / SETTINGS).is_file():
        return f"--bpe tokenizer_json --tokenizer-json-folder {folder}"
    if (folder / PIECES[0]).is_file():
        return f"--bpe gpt2 --gpt2-encoder-json {folder / PIECES[0]} --gpt2-vocab-bpe {folder / PIECES[1]}"
    return None


def read_end_of_text(path: Path) -> int:
    """Reads the id of the end-of-text token in a file that `from-huggingface` wrote, or raises a `ValueError`."""
    value: Any = read_json(path).get("end_of_text")
    if not is_id(value):
        raise InvalidInput(f"{path}: end_of_text is {str(value)[:200]}; it must be a whole number")
    return int(value)


def read_added_tokens(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads the added tokens of a tokenizer.json, each with its content and id, or raises a `ValueError`."""
    entries = content.get("added_tokens") or []
    if not isinstance(entries, list):
        raise InvalidInput(f"{path}: added_tokens is {str(entries)[:200]}; it must be a list")
    for entry in entries:
        token, value = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not isinstance(token, str) or not token or not is_id(value):
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
