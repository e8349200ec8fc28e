"""`--bpe byte_level`: the byte-level BPE of converted models that fairseq's `--bpe gpt2` cannot run.

The tokenizer of GPT-NeoX and Pythia normalises a text to Unicode's form C, and makes runs of spaces tokens of their own
before the BPE.
"""

# No `from __future__ import annotations` here: fairseq reads the types of a configuration's fields as they stand.

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq.data.encoders import register_bpe
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder
from fairseq.dataclass import FairseqDataclass

from fairseq_fastweights.conversion.tokenizers.byte_level_files import PIECES, read_merges, read_pieces, read_settings
from fairseq_fastweights.invalid_input import InvalidInput


@dataclass
class ByteLevelBPEConfig(FairseqDataclass):
    """Options of `--bpe byte_level`."""

    byte_level_folder: str = field(
        default="",
        metadata={"help": "a folder that `python -m fairseq_fastweights.conversion from-huggingface` wrote"},
    )


@register_bpe("byte_level", dataclass=ByteLevelBPEConfig)
class ByteLevelBPE:
    """Encodes text as token numbers, which are the words of fairseq's dictionary, and decodes them.

    Args:
        cfg: its `byte_level_folder` holds encoder.json, vocab.bpe and byte_level.json.

    Raises:
        ValueError: if one of these files is missing or cannot be read.
    """

    def __init__(self, cfg: Any) -> None:
        folder = Path(cfg.byte_level_folder)
        missing = [name for name in PIECES if not (folder / name).is_file()]
        if not cfg.byte_level_folder or missing:
            raise InvalidInput(
                f"byte_level_folder is {cfg.byte_level_folder!r}; it must be a folder with {', '.join(PIECES)}"
            )
        settings = read_settings(folder)
        known, merges = read_pieces(folder), read_merges(folder)  # fairseq reads them as they are
        made = (*bytes_to_unicode().values(), *(first + second for first, second in merges))
        if lacking := next((piece for piece in made if piece not in known), None):
            raise InvalidInput(f"{folder / PIECES[0]}: it lacks the piece {lacking!r}, which {PIECES[1]} makes")
        self._bpe = get_encoder(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
        self._normalize = settings["normalizer"] == "NFC"
        self._end_of_text = settings["end_of_text"]
        added = settings["added"]
        self._numbers = {entry["word"]: entry["number"] for entry in added}
        self._first = _any_of(entry["word"] for entry in added if not entry["normalized"])
        later = [entry for entry in added if entry["normalized"]]
        self._numbers |= {self._normalized(entry["word"]): entry["number"] for entry in later}
        self._then = _any_of(self._normalized(entry["word"]) for entry in later)
        pieces = set(settings["vocabulary"])
        to_byte = self._bpe.byte_decoder
        self._bytes = {
            number: bytes(to_byte[character] for character in piece)
            for number, piece in self._bpe.decoder.items()
            if number in pieces and all(character in to_byte for character in piece)
        }
        self._bytes |= {entry["number"]: entry["word"].encode() for entry in added}

    def encode(self, x: str) -> str:
        """Returns numbers, joined by spaces; an end-of-text token in the text becomes fairseq's </s>."""
        numbers: list[int] = []
        for raw, word in _cut(x, self._first):
            for text, later in _cut(self._normalized(raw), self._then):
                numbers += self._bpe.encode(text)
                numbers += [self._numbers[later]] if later else []
            numbers += [self._numbers[word]] if word else []
        return " ".join("</s>" if number == self._end_of_text else str(number) for number in numbers)

    def decode(self, x: str) -> str:
        """Returns the text of numbers that are joined by spaces. Bytes that are not valid UTF-8 become U+FFFD."""
        return b"".join(map(self._bytes_of, x.split())).decode("utf-8", errors="replace")

    def _bytes_of(self, word: str) -> bytes:
        if word == "</s>":
            word = str(self._end_of_text)
        # Embeddings that only fill a matrix up have numbers and stand for nothing; <unk> stands for itself.
        return self._bytes.get(int(word), b"") if word.isdecimal() else word.encode()

    def is_beginning_of_word(self, x: str) -> bool:
        return self.decode(x).startswith(" ")

    def _normalized(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self._normalize else text


def _any_of(words: Iterable[str]) -> "re.Pattern[str] | None":
    """A pattern that matches any of the words, the longest first."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _cut(text: str, words: "re.Pattern[str] | None") -> Iterable[tuple[str, str]]:
    """Splits the text at `words`: pieces, each with the word after it; None after the last."""
    start = 0
    for match in words.finditer(text) if words is not None else ():
        yield text[start : match.start()], match[0]
        start = match.end()
    yield text[start:], ""
