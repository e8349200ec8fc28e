#!/usr/bin/env python
"""Translates the validation and the test set with a trained model, and scores the translations.

generate.sh DATA OUT [OPTION ...]

DATA    as prepare.sh leaves it
OUT     the folder of the model: checkpoint_best.pt is read; for each set it writes
        generate-SET.log    the output of fairseq-generate
        generate-SET.hyp    the translations as plain text, line by line those of the source
        generate-SET.json   BLEU of that text with sacrebleu's signature; BLEU as older papers have it, of Moses'
                            tokens with compounds split; seconds, tokens per second, options
OPTION  of fairseq-generate (--fp16, --cpu, --max-tokens N, ...); it overrides those that this program sets

SUBSETS (default "valid test") in the environment are the sets. A result that is there already is kept, unless it is of
another model or other data.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import run_to_the_end
from common.files import UserError, open_new, read_text, write_whole
from common.identity import difference, identity, split_files
from preparation import RECORD
from subwords import KINDS

OPTIONS = "--beam 4 --lenpen 0.6 --max-len-a 1 --max-len-b 50".split()
"""As Vaswani et al. 2017: beam 4, length penalty 0.6, at most 50 tokens longer than the source."""
REFUSED = {
    **dict.fromkeys(
        ("--remove-bpe", "--post-process", "--quiet", "--results-path"),
        "it must not be given, as the translations are read from the subwords in the log",
    ),
    "--gen-subset": "set SUBSETS in the environment",
}
_SKIP = "--skip-invalid-size-inputs-valid-test"


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    data, out, *options = arguments
    return run_to_the_end(lambda: translate(Path(data), Path(out), options))


def translate(data: Path, out: Path, given: list[str]) -> None:
    """Raises UserError if a folder lacks a file, an option must not be given, or the generation fails."""
    for name, folder, file in (("DATA", data, RECORD), ("OUT", out, "checkpoint_best.pt")):
        if not (folder / file).exists():
            raise UserError(f"{name} is {folder}, which holds no {file}")
    for option in given:
        if reason := REFUSED.get(option.split("=")[0]):
            raise UserError(f"OPTION is {option}; {reason}")
    subsets = (os.environ.get("SUBSETS") or "valid test").split()
    if not {*subsets} <= {"valid", "test"}:
        raise UserError(f"SUBSETS is {' '.join(subsets)}; it must be valid, test or both")
    # All that can be wrong was looked at; now comes the work of minutes or hours.
    options = [*OPTIONS, *given]
    for subset in subsets:
        name, of = out / f"generate-{subset}", identity(out / "checkpoint_best.pt", split_files(data, subset))
        result, log = name.with_suffix(".json"), name.with_suffix(".log")
        if result.exists():
            values = json.loads(result.read_text(encoding="utf-8"))
            different = difference(values.get("of"), of)
            if not different:
                report(out, result, values, options)
                continue
            print(f"{out}: {result} {different}", flush=True)
        print(f"{out}: translating {subset}", flush=True)
        generate(data, out, subset, log, options)
        values = make(log, data, subset, options) | {"of": of}
        write_whole(result, json.dumps(values, indent=2) + "\n")
        report(out, result, values, options)


def generate(data: Path, out: Path, subset: str, log: Path, options: list[str]) -> None:
    """Runs fairseq-generate; raises UserError if it fails."""
    words = ["fairseq-generate", str(data), "--path", str(out / "checkpoint_best.pt"), "--gen-subset", subset]
    # One process: fairseq would give each of several GPUs its share of the sentences.
    words += "--user-dir fairseq_fastweights --task translation --distributed-world-size 1 --no-progress-bar".split()
    unfinished = log.with_name(f"{log.name}.unfinished")
    with open_new(unfinished) as file:
        # Unbuffered, so that no message on stderr lands within a translation.
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        done = subprocess.run([*words, *options], stdout=file, stderr=subprocess.STDOUT, env=env, check=False)
    if done.returncode:
        print(*unfinished.read_text(encoding="utf-8", errors="replace").splitlines()[-3:], sep="\n", file=sys.stderr)
        raise UserError(f"generation failed; {unfinished} says more")
    unfinished.replace(log)


def make(log: Path, data: Path, subset: str, options: list[str]) -> dict[str, Any]:
    """Decodes the hypotheses in a log, writes them beside it and scores them. Raises UserError if the log lacks a
    sentence that was not to be skipped, or its own summary.
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
    subwords = KINDS[kind]((data / KINDS[kind].file).read_bytes(), target)
    texts = [subwords.decode(found.get(number, "")) for number in range(len(references))]
    values = {"subset": subset, **score(texts, references, target), "sentences": len(references)}
    write_whole(log.with_suffix(".hyp"), "".join(f"{line}\n" for line in texts))
    return values | {"skipped": len(missing), **speed, "options": options, "data": origin}


def read_generation(log: Path) -> tuple[dict[int, str], dict[str, float]]:
    """The best hypothesis by number of its sentence, in subwords; and their time. Raises UserError if the log ends too
    early.
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


def report(out: Path, result: Path, values: dict[str, Any], options: list[str]) -> None:
    """Prints one line. Raises UserError if the result was made with other options."""
    if values["options"] != options:
        raise UserError(
            f"{result} was made with the options {' '.join(values['options'])}, and these are {' '.join(options)}; "
            "delete it to generate again"
        )
    skipped = f", {values['skipped']} of them skipped and empty" if values["skipped"] else ""
    print(
        f"{out}: {values['subset']}: BLEU {values['bleu']:.2f} ({values['signature']}), compound-split "
        f"{values['compound_split_bleu']:.2f}; {values['sentences']} sentences{skipped}, "
        f"{values['tokens_per_second']:.0f} tokens/s"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
