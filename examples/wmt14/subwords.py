"""The two ways of cutting text into subwords, and of putting it together again."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stderr

from common.files import UserError
from common.sentencepieces import SentencePieces


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
        """Learns a given number of merges from the tokenised lines of both languages. Raises UserError if there are
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
            raise UserError(f"VOCABULARY is {vocabulary}; this text gives at most {merges} merges")
        return codes.getvalue().encode()


Subwords = SentencePieces | MosesBpe
KINDS: dict[str, type[Subwords]] = {"sentencepiece": SentencePieces, "bpe": MosesBpe}
"""By the names that SUBWORDS has for them."""


def prepare_lines(kind: str, language: str, lines: list[str]) -> list[str]:
    """Clean lines as `encode` wants them: for BPE with their punctuation normalised, in Moses' tokens."""
    if kind == "sentencepiece":
        return lines
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    return [
        tokenizer.tokenize(normalizer.normalize(line), aggressive_dash_splits=True, return_str=True) for line in lines
    ]
