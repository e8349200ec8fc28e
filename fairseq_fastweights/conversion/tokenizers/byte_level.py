"""The byte-level BPE of a Hugging Face folder, as the files that `--bpe gpt2` and `--bpe byte_level` read.

The first is fairseq's. The second also normalises to NFC, and separates some words before the BPE. A tokenizer that
does anything else is refused, with an error that names it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from fairseq_fastweights.conversion.files.weight_files import read_json
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import is_number, read_added_tokens
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.text_files import read_text

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The possible files of a tokenizer, besides those of `template_names`."""

TEMPLATE = FILES[-1]
TEMPLATES = "additional_chat_templates"
_TEMPLATE = re.compile(rf"{TEMPLATES}/\w[\w.-]*\.jinja", re.ASCII)

_END_OF_TEXT = "<|endoftext|>"


def is_template(name: str) -> bool:
    """True if this is the name, in its folder, of a chat template beside the first."""
    return _TEMPLATE.fullmatch(name) is not None


def template_names(folder: Path) -> list[str]:
    """The names of the chat templates beside the first that are in a folder."""
    files = (folder / TEMPLATES).iterdir() if (folder / TEMPLATES).is_dir() else ()
    return sorted(name for file in files if is_template(name := f"{TEMPLATES}/{file.name}"))


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE.

    Args:
        vocabulary: numbers of the BPE's pieces, which have a printable character for each byte.
        merges: pairs of pieces to join, in order.
        added: numbers of words that are separated from a text before the BPE.
        normalized: those of them that are searched after normalisation instead of before it.
        special: those of them that are no text.
        normalizer: "NFC", or None.
        source: name of the file.
    """

    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]
    added: dict[str, int]
    normalized: frozenset[str]
    special: frozenset[str]
    normalizer: str | None
    source: str

    @property
    def size(self) -> int:
        """One more than the largest number."""
        return 1 + max([*self.vocabulary.values(), *self.added.values()])

    @property
    def end_of_text(self) -> int | None:
        """The number of <|endoftext|>, if there is one."""
        return self.added.get(_END_OF_TEXT, self.vocabulary.get(_END_OF_TEXT))

    def options(self, folder: Path, end_of_text: int) -> str:
        """The options of fairseq's commands that name this tokenizer."""
        if self.is_plain(end_of_text):
            return f"--bpe gpt2 --gpt2-encoder-json {folder}/encoder.json --gpt2-vocab-bpe {folder}/vocab.bpe"
        return f"--bpe byte_level --byte-level-folder {folder}"

    def is_plain(self, end_of_text: int) -> bool:
        """True if fairseq's `gpt2` gives the same numbers for any text without the end-of-text word in it."""
        return self.normalizer is None and set(self.added.values()) <= {end_of_text}

    def check(self, vocabulary_size: int, end_of_text: int) -> None:
        """Checks that this can be the tokenizer of a model with a number of word types.

        Raises:
            ValueError: if it has more, or so many fewer that the difference cannot be padding to a multiple of a power
                of 2; or if the end-of-text token is a piece of ordinary text.
        """
        multiples = [2**n for n in range(11)]
        if vocabulary_size not in {-(-self.size // m) * m for m in multiples}:
            raise InvalidInput(
                f"{self.source}: the tokenizer has {self.size} word types, but the model, in config.json's vocab_size, "
                f"{vocabulary_size}; it must be as many, or padded to a multiple of a power of 2 up to 1024"
            )
        made = set(bytes_to_unicode().values()) | {first + second for first, second in self.merges}
        piece = next((piece for piece in made if self.vocabulary[piece] == end_of_text), None)
        if piece is not None:
            raise InvalidInput(
                f"config.json: eos_token_id is {end_of_text}, which in {self.source} is {piece!r}, a piece of text; it "
                "must be a word of its own"
            )

    def write(self, folder: Path, vocabulary_size: int, end_of_text: int) -> None:
        """Writes `encoder.json` and `vocab.bpe` for fairseq, and `byte_level.json` for `--bpe byte_level`."""
        printable = bytes_to_unicode()
        pieces = {piece: number for piece, number in self.vocabulary.items() if set(piece) <= set(printable.values())}
        numbers = set(pieces.values())
        for word, number in self.added.items():
            if number not in numbers:
                name = "".join(printable[byte] for byte in word.encode())
                # The same characters may be a piece of the BPE with another number.
                pieces[name if name not in pieces else f"<|{number}|>"] = number
                numbers.add(number)
        # Nothing encodes to these, but a model may draw them.
        pieces |= {f"<|{number}|>": number for number in range(vocabulary_size) if number not in numbers}
        (folder / "encoder.json").write_text(json.dumps(pieces), encoding="ascii")
        # fairseq leaves out the first line and what comes after the last line end.
        lines = ["#version: 0.2", *(f"{first} {second}" for first, second in self.merges)]
        (folder / "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
        settings = {
            "normalizer": self.normalizer,
            "end_of_text": end_of_text,
            "vocabulary": sorted(self.vocabulary.values()),
            "added": [
                {"word": word, "number": number}
                | {"normalized": word in self.normalized, "special": word in self.special}
                for word, number in self.added.items()
            ],
        }
        (folder / "byte_level.json").write_text(json.dumps(settings), encoding="ascii")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Reads `tokenizer.json`, or `vocab.json` and `merges.txt` if it does not exist.

    Raises:
        ValueError: if there is neither, or the tokenizer does something else than a byte-level BPE.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer = _from_one_file(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        tokenizer = _from_two_files(folder)
    else:
        raise InvalidInput(
            f"{folder}: there is no tokenizer; it must hold tokenizer.json, or vocab.json and merges.txt"
        )
    _check_pieces(tokenizer)
    return tokenizer


def _from_one_file(path: Path) -> Tokenizer:
    content = read_json(path)
    model = content.get("model")
    if not isinstance(model, dict):
        raise InvalidInput(f"{path}: model is missing; it must describe a BPE")
    # Files of some versions leave the type out, and the merges tell.
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise InvalidInput(f"{path}: model is {kind!r}; only 'BPE' is supported")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(name):
            raise InvalidInput(f"{path}: {name} of the model is {model[name]!r}; it must not be set")
    splitter = content.get("pre_tokenizer") or {}
    if _kind(splitter) != "ByteLevel" or splitter.get("add_prefix_space", True) or not splitter.get("use_regex", True):
        raise InvalidInput(
            f"{path}: pre_tokenizer is {_describe(splitter)}; only ByteLevel with add_prefix_space false and use_regex "
            "true is supported"
        )
    normalizer = content.get("normalizer") or {}
    if _kind(normalizer) not in (None, "NFC"):
        raise InvalidInput(f"{path}: normalizer is {_describe(normalizer)}; only NFC, or none, is supported")
    after = content.get("post_processor") or {}
    # ByteLevel changes offsets only; a template may add words.
    if _kind(after) not in (None, "ByteLevel") and (
        _kind(after) != "TemplateProcessing" or after.get("special_tokens")
    ):
        raise InvalidInput(f"{path}: post_processor is {_describe(after)}; only ByteLevel, or none, is supported")
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise InvalidInput(f"{path}: merges of the model are missing")
    added: dict[str, int] = {}
    normalized, special = set(), set()
    for entry in read_added_tokens(path, content):
        word, number = entry["content"], entry["id"]
        for name in ("lstrip", "rstrip", "single_word"):
            if entry.get(name):
                raise InvalidInput(f"{path}: {name} of the added token {word!r} is set; it must not be")
        added[word] = number
        if entry.get("normalized"):
            normalized.add(word)
        if entry.get("special"):
            special.add(word)
    return Tokenizer(
        vocabulary=_vocabulary(path, model.get("vocab")),
        merges=[_merge(path, pair.split(" ") if isinstance(pair, str) else pair) for pair in merges],
        added=added,
        normalized=frozenset(normalized),
        special=frozenset(special),
        normalizer=_kind(normalizer),
        source=path.name,
    )


def _from_two_files(folder: Path) -> Tokenizer:
    path = folder / "merges.txt"
    lines = read_text(path).split("\n")
    lines = [line for line in lines[lines[0].startswith("#version") :] if line.strip()]
    if (folder / "tokenizer_config.json").is_file():
        config = read_json(folder / "tokenizer_config.json")
        for name in ("add_prefix_space", "add_bos_token"):
            if config.get(name):
                raise InvalidInput(f"{folder / 'tokenizer_config.json'}: {name} is set; it must not be")
    vocabulary = _vocabulary(folder / "vocab.json", read_json(folder / "vocab.json"))
    added = {}
    if (folder / "added_tokens.json").is_file():
        added = _vocabulary(folder / "added_tokens.json", read_json(folder / "added_tokens.json"))
    if _END_OF_TEXT in vocabulary:
        added[_END_OF_TEXT] = vocabulary[_END_OF_TEXT]
    return Tokenizer(
        vocabulary=vocabulary,
        merges=[_merge(path, line.rstrip("\r").split(" ")) for line in lines],
        added=added,
        normalized=frozenset(),
        special=frozenset(),
        normalizer=None,
        source="vocab.json",
    )


def _vocabulary(path: Path, content: Any) -> dict[str, int]:
    if not isinstance(content, dict) or not all(is_number(number) for number in content.values()):
        raise InvalidInput(f"{path}: the vocabulary must give each piece its number")
    if len(set(content.values())) < len(content):
        raise InvalidInput(f"{path}: the vocabulary has several pieces with the same number")
    return content


def _merge(path: Path, pair: Any) -> tuple[str, str]:
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
        raise InvalidInput(f"{path}: merges hold {pair!r}; each must be two pieces")
    return pair[0], pair[1]


def _check_pieces(tokenizer: Tokenizer) -> None:
    lacking = [piece for piece in bytes_to_unicode().values() if piece not in tokenizer.vocabulary]
    if lacking:
        raise InvalidInput(
            f"{tokenizer.source}: {len(lacking)} of the 256 bytes have no piece, {lacking[0]!r} for one; a byte-level "
            "BPE has them all"
        )
    for first, second in tokenizer.merges:
        if first + second not in tokenizer.vocabulary:
            raise InvalidInput(
                f"{tokenizer.source}: merges join {first!r} and {second!r}, which the vocabulary lacks as one piece"
            )
    # GPT-NeoX's vocab.json lists its runs of spaces as they are; only tokenizer.json says that they are cut out first.
    strange = set(tokenizer.vocabulary) - set(tokenizer.added)
    strange = {piece for piece in strange if not set(piece) <= set(bytes_to_unicode().values())}
    if strange:
        raise InvalidInput(
            f"{tokenizer.source}: {len(strange)} pieces, {min(strange)!r} for one, are not written in characters for "
            "bytes; they must be among the added tokens, as tokenizer.json has them"
        )
    words = {number: piece for piece, number in tokenizer.vocabulary.items()}
    for word, number in tokenizer.added.items():
        if words.get(number, word) != word:
            raise InvalidInput(
                f"{tokenizer.source}: {number} is {words[number]!r} in the vocabulary and {word!r} in added_tokens"
            )


def _kind(part: Any) -> str | None:
    return part.get("type") if isinstance(part, dict) else repr(part)


def _describe(part: Any) -> str:
    if not part:
        return "missing"
    if not isinstance(part, dict):
        return repr(part)
    inner = part.get("pretokenizers") or part.get("normalizers") or part.get("processors")
    if isinstance(inner, list):
        return f"{_kind(part)} ({', '.join(str(_kind(one)) for one in inner)})"
    settings = [f"{name} {json.dumps(value)}" for name, value in part.items() if isinstance(value, bool)]
    return " ".join([str(_kind(part)), *settings])
