#!/usr/bin/env python
"""Cuts a corpus in WikiText's format into subwords, for prepare.sh.

    cut.py TEXT OUT VOCABULARY

TEXT has wiki.{train,valid,test}.tokens. OUT gets the same files in subwords of sentencepiece, learned from the training
text; their model, subwords.model; fairseq's dictionary, dict.txt; and words.json, the numbers of words and subwords of
each file, line ends among both, from which a perplexity per word is told.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import run_to_the_end
from common.files import SPLITS, UserError, read_lines, write_whole
from common.sentencepieces import SentencePieces

UNKNOWN = "\N{WHITE SQUARE}"
"""The sign for WikiText's <unk>, which is a word of the text and not a subword that the model does not know."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    text, out, vocabulary = arguments
    return run_to_the_end(lambda: _cut(Path(text), Path(out), int(vocabulary)))


def _cut(text: Path, out: Path, vocabulary: int) -> None:
    """Raises UserError if the text cannot be cut so."""
    lines = {split: _read(text / _name(split)) for split in SPLITS}
    model = SentencePieces.learn(lines["train"], vocabulary)
    pieces = SentencePieces(model)
    counts = {}
    for split, raw in lines.items():
        cut = pieces.encode(raw)
        write_whole(out / _name(split), "".join(f"{line}\n" for line in cut))
        words, subwords = (sum(len(line.split()) + 1 for line in some) for some in (raw, cut))
        counts[split] = {"words": words, "subwords": subwords}
    assert pieces.dictionary is not None
    write_whole(out / "dict.txt", "".join(f"{name} 1\n" for name in pieces.dictionary))
    write_whole(out / pieces.file, model)
    write_whole(out / "words.json", json.dumps(counts) + "\n")


def _name(split: str) -> str:
    return f"wiki.{split}.tokens"


def _read(path: Path) -> list[str]:
    """The lines, with words one space apart. Raises UserError if `UNKNOWN` is in them."""
    lines = []
    for number, (line, _) in enumerate(read_lines(path), 1):
        if UNKNOWN in line:
            raise UserError(f"{path}, line {number} has a {UNKNOWN}, which stands for <unk> in the subwords")
        lines.append(" ".join(line.replace("<unk>", UNKNOWN).split()))
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
