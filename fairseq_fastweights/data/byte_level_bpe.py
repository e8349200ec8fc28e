"""`--bpe byte_level`: the byte-level BPE of models that were converted before `--bpe tokenizer_json` read all."""

# No `from __future__ import annotations` here: fairseq reads the types of a configuration's fields as they stand.

import json
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass

from fairseq_fastweights.conversion.tokenizers.byte_level_files import PIECES, read_pieces
from fairseq_fastweights.conversion.tokenizers.tokenizer_json import FILE, SETTINGS, open_tokenizer, read_end_of_text
from fairseq_fastweights.data.tokenizer_json import TokenizerJson
from fairseq_fastweights.invalid_input import InvalidInput


@dataclass
class ByteLevelBPEConfig(FairseqDataclass):
    """Options of `--bpe byte_level`."""

    byte_level_folder: str = field(
        default="",
        metadata={"help": "a folder that `python -m fairseq_fastweights.conversion from-huggingface` wrote"},
    )


@register_bpe("byte_level", dataclass=ByteLevelBPEConfig)
class ByteLevelBPE(TokenizerJson):
    """Encodes text as token numbers, which are the words of fairseq's dictionary, and decodes them.

    Args:
        cfg: its `byte_level_folder` holds tokenizer.json and tokenizer_words.json, or, from an earlier conversion,
            encoder.json, vocab.bpe and byte_level.json.

    Raises:
        ValueError: if one of these files is missing or cannot be read.
    """

    def __init__(self, cfg: Any) -> None:
        folder = Path(cfg.byte_level_folder)
        whole, former = (all((folder / name).is_file() for name in names) for names in ((FILE, SETTINGS), PIECES))
        if not cfg.byte_level_folder or not (whole or former):
            raise InvalidInput(
                f"byte_level_folder is {cfg.byte_level_folder!r}; it must be a folder with {', '.join(PIECES)}, or "
                f"with {FILE} and {SETTINGS}"
            )
        if whole:
            self._open(open_tokenizer(folder / FILE), read_end_of_text(folder / SETTINGS))
        else:
            content, end = read_pieces(folder)
            self._open(open_tokenizer(folder / PIECES[0], json.dumps(content)), end)

    def decode(self, x: str) -> str:
        """Returns the text of numbers that are joined by spaces; other words, as <unk>, stand for themselves.

        Bytes that are not valid UTF-8 become U+FFFD.
        """
        words = (str(self._end_of_text) if word == "</s>" else word for word in x.split())
        # Added tokens are text, and no characters for bytes.
        said = ((word, self._added.get(int(word)) if word.isdecimal() else word) for word in words)
        parts = groupby(said, key=lambda pair: pair[1] is None)
        return "".join(
            super(ByteLevelBPE, self).decode(" ".join(word for word, _ in part))
            if in_bytes
            else "".join(str(text) for _, text in part)
            for in_bytes, part in parts
        )
