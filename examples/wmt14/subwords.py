"""The two ways of cutting text into subwords, and of putting it together again."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stderr
from typing import Protocol

from common.files import TextError


class Subwords(Protocol):
    """Cuts text and puts it together.

    `file`: the name under which the model is kept beside the data. `dictionary`: the words of fairseq's dictionary,
    where the model knows them all; otherwise they are counted.
    """

    file: str
    dictionary: list[str] | None

    def encode(self, lines: list[str]) -> list[str]:
        """Lines of `prepare_lines` as subwords, separated by spaces."""

    def decode(self, line: str) -> str:
        """Subwords of the target language as a line of text."""


class SentencePieces:
    """sentencepiece's BPE, on the text as it is: what is decoded is what was encoded, to the letter.

    The text is not normalised. What is too rare for the vocabulary is spelled out in bytes, so nothing is unknown.
    """

    file = "subwords.model"

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_proto=model)
        # Without <unk>, <s> and </s>, which fairseq has of its own.
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
    def learn(lines: Iterable[str], vocabulary: int) -> bytes:
        """Learns a vocabulary of a given size from the lines of both languages. Raises TextError if it cannot have
        that size.
        """
        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocabulary,
                character_coverage=0.9995,  # not each character of other scripts that a crawl picked up
                byte_fallback=True,
                normalization_rule_name="identity",
                minloglevel=2,
            )
        except RuntimeError as error:
            if found := re.search(r"set it to a value <= (\d+)", str(error)):
                raise TextError(f"VOCABULARY is {vocabulary}; this text gives at most {found[1]} subwords") from None
            if found := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
                raise TextError(
                    f"VOCABULARY is {vocabulary}; it must be at least {found[1]}, for the text's characters and bytes"
                ) from None
            raise TextError(f"sentencepiece cannot learn from this text: {error}") from None
        return model.getvalue()


class MosesBpe:
    """Moses tokenisation (sacremoses) and subword-nmt's BPE, as in the paper and in fairseq's own preparation."""

    file = "subwords.codes"
    dictionary: list[str] | None = None

    def __init__(self, codes: bytes, target: str) -> None:
        from sacremoses import MosesDetokenizer  # type: ignore[import-untyped]
        from subword_nmt.apply_bpe import BPE  # type: ignore[import-untyped]

        self._bpe = BPE(io.StringIO(codes.decode()))
        self._detokenizer = MosesDetokenizer(lang=target)

    def encode(self, lines: list[str]) -> list[str]:
        return [self._bpe.process_line(line) for line in lines]

    def decode(self, line: str) -> str:
        words = re.sub(r"@@( |$)", "", line).split()
        return " ".join(self._detokenizer.detokenize(words).split())

    @staticmethod
    def learn(lines: Iterable[str], vocabulary: int) -> bytes:
        """Learns a given number of merges from the tokenised lines of both languages. Raises TextError if there are
        not as many.
        """
        from subword_nmt.learn_bpe import learn_bpe  # type: ignore[import-untyped]

        words: Counter[str] = Counter()
        for line in lines:
            words.update(line.split())
        codes = io.StringIO()
        counts = [f"{word} {count}" for word, count in words.items()]
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):  # its bar of progress
            learn_bpe(counts, codes, vocabulary, is_dict=True)
        merges = codes.getvalue().count("\n") - 1
        if merges < vocabulary:
            raise TextError(f"VOCABULARY is {vocabulary}; this text gives at most {merges} merges")
        return codes.getvalue().encode()


KINDS = ("sentencepiece", "bpe")


def learn_subwords(kind: str, lines: Iterable[str], vocabulary: int) -> bytes:
    """What `load_subwords` takes, learned from prepared lines."""
    return (SentencePieces if kind == "sentencepiece" else MosesBpe).learn(lines, vocabulary)


def load_subwords(kind: str, model: bytes, target: str) -> Subwords:
    """The subwords that were learned; `target` is the language of what is decoded."""
    return SentencePieces(model) if kind == "sentencepiece" else MosesBpe(model, target)


def model_file(kind: str) -> str:
    """The name of the model's file."""
    return (SentencePieces if kind == "sentencepiece" else MosesBpe).file


def prepare_lines(kind: str, language: str, lines: list[str]) -> list[str]:
    """Clean lines as `encode` wants them: for BPE with their punctuation normalised, in Moses' tokens."""
    if kind == "sentencepiece":
        return lines
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return [
        tokenizer.tokenize(normalizer.normalize(line), aggressive_dash_splits=True, return_str=True) for line in lines
    ]
