#!/usr/bin/env python
"""Scores what fairseq-generate logged: generate.sh calls it.

score.py identify DATA SUBSET CHECKPOINT                         prints in one line what a RESULT would be OF
score.py make LOG DATA SUBSET HYPOTHESES RESULT OF [OPTION ...]  writes HYPOTHESES and RESULT
score.py report RESULT OF [OPTION ...]                           tells a RESULT that is there, made with OPTIONs; exit
                                                                 status 3 if it is of something else
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.files import UserError, write_whole
from common.identity import difference, identity, split_files
from corpus import read_text
from preparation import RECORD
from subwords import load_subwords, model_file

OTHER = 3
"""The exit status where a result is there, of another model or other data."""
_SKIP = "--skip-invalid-size-inputs-valid-test"


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    try:
        verb, *rest = arguments
        if verb == "identify":
            data, subset, checkpoint = rest
            print(json.dumps(identity("", Path(checkpoint), split_files(Path(data), subset))))
            return 0
        if verb == "make":
            log, data, subset, hypotheses, result, of, *options = rest
            make(Path(log), Path(data), subset, Path(hypotheses), Path(result), json.loads(of), options)
        else:
            result, of, *options = rest
        values = json.loads(Path(result).read_text(encoding="utf-8"))
        if different := difference(values.get("of"), json.loads(of)):
            print(f"{result} {different}")
            return OTHER
        report(Path(result), values, options)
    except UserError as error:
        print(f"generate.sh: {error}", file=sys.stderr)
        return 1
    return 0


def make(
    log: Path, data: Path, subset: str, hypotheses: Path, result: Path, of: dict[str, str], options: list[str]
) -> None:
    """Decodes and scores the hypotheses in a log. Raises UserError if the log lacks a sentence that was not to be
    skipped, or its own summary.
    """
    origin = json.loads((data / RECORD).read_text(encoding="utf-8"))["made from"]
    kind, target = origin["subwords"], origin["target"]
    references = read_text(data / "raw" / f"{subset}.{target}")
    found, speed = read_generation(log)
    missing = [number for number in range(len(references)) if number not in found]
    if missing and _SKIP not in options:
        raise UserError(
            f"{log} lacks {len(missing)} of {len(references)} sentences, the first in line {missing[0] + 1}"
        )
    subwords = load_subwords(kind, (data / model_file(kind)).read_bytes(), target)
    texts = [subwords.decode(found.get(number, "")) for number in range(len(references))]
    scores = score(texts, references, target)
    values = {"subset": subset, **scores, "sentences": len(references), "skipped": len(missing), **speed}
    values |= {"options": options, "data": origin, "of": of}
    write_whole(hypotheses, "".join(f"{line}\n" for line in texts))
    write_whole(result, json.dumps(values, indent=2) + "\n")


def read_generation(log: Path) -> tuple[dict[int, str], dict[str, float]]:
    """The best hypothesis by number of its sentence, in subwords; and how long they took. Raises UserError if the log
    ends too early.
    """
    found: dict[int, str] = {}
    speed = None
    for line in read_text(log):
        if match := re.match(r"H-(\d+)\t[^\t]*\t(.*)", line, re.DOTALL):
            found.setdefault(int(match[1]), match[2])  # with --nbest the best comes first
        elif match := re.search(r"\| Translated [\d,]+ sentences \(([\d,]+) tokens\) in ([\d.]+)s", line):
            tokens, seconds = int(match[1].replace(",", "")), float(match[2])
            per_second = re.search(r"([\d.]+) tokens/s\)", line)
            rate = float(per_second[1] if per_second else 0)
            speed = {"tokens": tokens, "seconds": seconds, "tokens_per_second": rate}
    if speed is None:
        raise UserError(f"{log} ends before fairseq-generate was done")
    return found, speed


def score(hypotheses: list[str], references: list[str], language: str) -> dict[str, Any]:
    """BLEU of detokenised text, and that of older papers: of Moses' tokens, with compounds split at their hyphens."""
    from sacrebleu.metrics import BLEU

    bleu = BLEU(trg_lang=language)
    split = BLEU(tokenize="none", force=True)
    values = {"bleu": bleu.corpus_score(hypotheses, [references]).score, "signature": bleu.get_signature().format()}
    sides = [tokenize_and_split(lines, language) for lines in (hypotheses, references)]
    values["compound_split_bleu"] = split.corpus_score(sides[0], [sides[1]]).score
    values["compound_split_signature"] = split.get_signature().format()
    return values


def tokenize_and_split(lines: Iterable[str], language: str) -> list[str]:
    """Moses' tokens, with the hyphens within words as tokens of their own (Vaswani et al. 2017)."""
    from sacremoses import MosesTokenizer  # type: ignore[import-untyped]

    tokenizer = MosesTokenizer(lang=language)
    return [split_compounds(tokenizer.tokenize(line, return_str=True)) for line in lines]


def split_compounds(line: str) -> str:
    """Splits a line's compounds as fairseq's compound_split_bleu.sh: `s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g`."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def report(result: Path, values: dict[str, Any], options: list[str]) -> None:
    """Prints one line. Raises UserError if the result was made with other options."""
    if values["options"] != options:
        raise UserError(
            f"{result} was made with the options {' '.join(values['options'])}, and these are {' '.join(options)}; "
            "delete it to generate again"
        )
    skipped = f", {values['skipped']} of them skipped and empty" if values["skipped"] else ""
    print(
        f"{values['subset']}: BLEU {values['bleu']:.2f} ({values['signature']}), compound-split "
        f"{values['compound_split_bleu']:.2f}; {values['sentences']} sentences{skipped}, "
        f"{values['tokens_per_second']:.0f} tokens/s"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
