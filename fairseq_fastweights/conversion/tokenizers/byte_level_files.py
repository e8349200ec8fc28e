"""Reads the files of `--bpe byte_level` and `--bpe gpt2`: encoder.json, vocab.bpe and byte_level.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import is_number
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.text_files import read_text

PIECES = ("encoder.json", "vocab.bpe", "byte_level.json")
"""The files of a byte-level BPE; without the last it is the one of fairseq's `--bpe gpt2`."""


def read_pieces(folder: Path) -> dict[str, int]:
    """Reads the number of each piece, in `encoder.json`.

    Raises:
        ValueError: if the file is missing or holds something else; the message names it.
    """
    path = folder / PIECES[0]
    content = read_json(path)
    for piece, number in content.items():
        if not is_number(number):
            raise InvalidInput(f"{path}: the number of {piece!r} is {str(number)[:200]}; it must be a whole number")
    return content


def read_merges(folder: Path) -> list[tuple[str, str]]:
    """Reads the pairs of pieces to join, in `vocab.bpe`.

    Raises:
        ValueError: if the file holds something else; the message names it.
    """
    path = folder / PIECES[1]
    merges = []
    for line in read_text(path).split("\n")[1:-1]:  # as fairseq reads it
        pair = line.split(" ")
        if len(pair) != 2:
            raise InvalidInput(f"{path}: it holds {line[:200]!r}; each line must be two pieces")
        merges.append((pair[0], pair[1]))
    return merges


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads what else the tokenizer does, in `byte_level.json`: "normalizer", "end_of_text", "vocabulary" and "added".

    Raises:
        ValueError: if the file is missing or holds something else; the message names it and the setting.
    """
    path = folder / PIECES[2]
    settings = {name: read_json(path).get(name) for name in ("normalizer", "end_of_text", "vocabulary", "added")}
    vocabulary, added = settings["vocabulary"], settings["added"]
    right = {
        "normalizer": settings["normalizer"] in (None, "NFC"),
        "end_of_text": is_number(settings["end_of_text"]),
        "vocabulary": isinstance(vocabulary, list) and all(map(is_number, vocabulary)),
        "added": isinstance(added, list) and all(map(_is_added, added)),
    }
    wrong = next((name for name in right if not right[name]), None)
    if wrong is not None:
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
