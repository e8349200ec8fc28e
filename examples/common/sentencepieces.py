"""Text in subwords of sentencepiece."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

from common.files import UserError


class SentencePieces:
    """sentencepiece's BPE, on the text as it is: decoding restores the encoded text to the letter.

    The text is not normalised. Characters too rare for the vocabulary are spelled out in bytes: nothing is unknown.
    """

    file = "subwords.model"
    """The name under which the model is kept beside the data."""

    def __init__(self, model: bytes, target: str = "") -> None:
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_proto=model)
        # The words of fairseq's dictionary, which has <unk>, <s> and </s> of its own.
        names = [self._processor.id_to_piece(i) for i in range(len(self._processor))]
        self.dictionary: list[str] | None = [
            name for i, name in enumerate(names) if not (self._processor.is_control(i) or self._processor.is_unknown(i))
        ]

    def encode(self, lines: list[str]) -> list[str]:
        return [" ".join(pieces) for pieces in self._processor.encode(lines, out_type=str)]

    def decode(self, line: str) -> str:
        # A line feed can come out of a model that spells bytes.
        return " ".join(self._processor.decode_pieces(line.split()).split())

    @staticmethod
    def learn(lines: Iterable[str], vocabulary: int, **settings: Any) -> bytes:
        """Learns a vocabulary of a given size from lines of text; `settings` are the trainer's. Raises UserError if it
        cannot have that size.
        """
        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocabulary,
                minloglevel=2,
                # Not each character of other scripts that a crawl picked up: bytes spell them.
                **{"character_coverage": 0.9995, "byte_fallback": True, "normalization_rule_name": "identity"}
                | settings,
            )
        except RuntimeError as error:
            if found := re.search(r"set it to a value <= (\d+)", str(error)):
                raise UserError(f"VOCABULARY is {vocabulary}; this text gives at most {found[1]} subwords") from None
            if found := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
                raise UserError(
                    f"VOCABULARY is {vocabulary}; it must be at least {found[1]}, for the text's characters and bytes"
                ) from None
            raise UserError(f"sentencepiece cannot learn from this text: {error}") from None
        return model.getvalue()
