"""`--bpe tokenizer_json`: a converted model's own tokenizer, run by Hugging Face's package `tokenizers`.

Most split texts by expressions of their own, and some write bytes as words, which no tokenizer of fairseq does.
"""

# No `from __future__ import annotations` here: fairseq reads the types of a configuration's fields as they stand.

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass

from fairseq_fastweights.conversion.tokenizers.tokenizer_json import FILE, SETTINGS, open_tokenizer, read_end_of_text
from fairseq_fastweights.invalid_input import InvalidInput


@dataclass
class TokenizerJsonConfig(FairseqDataclass):
    """Options of `--bpe tokenizer_json`."""

    tokenizer_json_folder: str = field(
        default="",
        metadata={"help": "a folder that `python -m fairseq_fastweights.conversion from-huggingface` wrote"},
    )


@register_bpe("tokenizer_json", dataclass=TokenizerJsonConfig)
class TokenizerJson:
    """Encodes text as token numbers, which are the words of fairseq's dictionary, and decodes them.

    Tokens that the tokenizer would add at the beginning of a text are left out.

    Args:
        cfg: its `tokenizer_json_folder` holds tokenizer.json and tokenizer_words.json.

    Raises:
        ValueError: if one of these files is missing or cannot be read.
    """

    def __init__(self, cfg: Any) -> None:
        folder = Path(cfg.tokenizer_json_folder)
        missing = [name for name in (FILE, SETTINGS) if not (folder / name).is_file()]
        if not cfg.tokenizer_json_folder or missing:
            raise InvalidInput(
                f"tokenizer_json_folder is {cfg.tokenizer_json_folder!r}; it must hold {FILE} and {SETTINGS}"
            )
        self._tokenizer, self._end_of_text = open_tokenizer(folder / FILE), read_end_of_text(folder / SETTINGS)

    def encode(self, x: str) -> str:
        """Returns numbers, joined by spaces; an end-of-text token in the text becomes fairseq's </s>."""
        numbers = self._tokenizer.encode(x, add_special_tokens=False).ids
        return " ".join("</s>" if number == self._end_of_text else str(number) for number in numbers)

    def decode(self, x: str) -> str:
        """Returns the text of numbers that are joined by spaces; fairseq's special symbols are left out."""
        numbers = (str(self._end_of_text) if word == "</s>" else word for word in x.split())
        known = [int(number) for number in numbers if number.isdecimal()]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def is_beginning_of_word(self, x: str) -> bool:
        word = self._tokenizer.id_to_token(int(x)) if x.isdecimal() else None
        return word is not None and word.startswith((" ", "Ġ", "▁"))
