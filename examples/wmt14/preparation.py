#!/usr/bin/env python
"""Makes fairseq's data of checked text: cleans, learns subwords, cuts into them, filters, binarises. See prepare.sh.

Each stage leaves a folder in OUT.unfinished whose name has a digest of all that went in, and which has that name only
when it is whole; it is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import ArgumentParser, run_to_the_end
from common.commands import cores
from common.files import UserError, read_lines
from common.processes import pool
from corpus import SPLITS, Corpus, clean, survey, write_text
from subwords import KINDS, Subwords, prepare_lines

VERSION = 1
"""Of the stages' code: goes into their digests."""
CHUNK = 20_000
"""Lines that one process works on at a time."""
RECORD = "preparation.json"
"""In a finished folder: its sources and settings."""
TO_DO = 3
"""The exit status of --check for an OUT that is not finished."""


@dataclass(frozen=True)
class Settings:
    """The settings that decide the data, besides the text."""

    source: str
    target: str
    subwords: str
    vocabulary: int
    max_length: int
    max_ratio: float


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = ArgumentParser(description="Makes fairseq's data of {train,valid,test}.{SRC,TGT}[.gz]; see prepare.sh.")
    parser.add_argument("out", type=Path, metavar="OUT", help="appears when all is done")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the text")
    parser.add_argument("--digest", help="stands for the text, which is then not read to know it")
    parser.add_argument("--check", action="store_true", help=f"only say whether OUT is finished; exit {TO_DO} if not")
    options = parser.parse_args(arguments)
    to_do = False

    def work() -> None:
        nonlocal to_do
        settings, workers = _settings(), _number("WORKERS", cores(), int)
        corpus = None if options.digest else survey(options.folder, settings.source, settings.target)
        digest = options.digest or (corpus.digest if corpus else "")
        if is_finished(options.out, {"text": digest, **asdict(settings)}):
            print(f"{options.out} is finished")
        elif options.check:
            to_do = True
        else:
            corpus = corpus or survey(options.folder, settings.source, settings.target)
            prepare(options.out, corpus, digest, settings, workers)

    return run_to_the_end(work) or (TO_DO if to_do else 0)


def _settings() -> Settings:
    """The settings in the environment."""
    defaults = {"SRC": "en", "TGT": "de", "SUBWORDS": "sentencepiece"}
    names = source, target, kind = [os.environ.get(name) or default for name, default in defaults.items()]
    if kind not in KINDS:
        raise UserError(f"SUBWORDS is {kind}; it must be {' or '.join(KINDS)}")
    for name, language in (("SRC", source), ("TGT", target)):
        if not (language.isascii() and language.isalnum()):
            raise UserError(f"{name} is {language!r}; it must be the short name of a language, as en or de")
    sizes = (("VOCABULARY", 32_000, int), ("MAX_LENGTH", 250, int), ("MAX_RATIO", 1.5, float))
    return Settings(*names, *(_number(*size) for size in sizes))


def _number(name: str, default: float, kind: type) -> Any:
    text = os.environ.get(name) or str(default)
    try:
        value = kind(text)
        if value >= 1:
            return value
    except ValueError:
        pass
    whole = "whole number" if kind is int else "number"
    raise UserError(f"{name} is {text!r}; it must be a {whole} of at least 1")


def is_finished(out: Path, origin: dict[str, Any]) -> bool:
    """True if `out` was made from just this. Raises UserError if `out` holds anything else."""
    record = out / RECORD
    if record.exists():
        made_from = json.loads(record.read_text(encoding="utf-8"))["made from"]
        different = [name for name in origin if made_from.get(name) != origin[name]]
        if not different:
            return True
        told = ["other text" if x == "text" else f"{x} {made_from.get(x)}, not {origin[x]}" for x in different]
        raise UserError(f"{out} was made with {', '.join(told)}; name another folder, or delete it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there, but is not what this script makes; name another folder, or delete it")
    return False


def prepare(out: Path, corpus: Corpus, digest: str, settings: Settings, workers: int) -> None:
    """Makes `out`, which is not there yet."""
    stages = Stages(out.with_name(f"{out.name}.unfinished"))
    kind, languages = settings.subwords, (settings.source, settings.target)

    # The digest of a stage has the name of the one before, and with it all that went into that.
    title, clean = f"cleaning {sum(corpus.pairs.values()):,} pairs", partial(_clean, corpus, kind, workers)
    text = stages.run("text", [digest, languages, kind], title, clean)
    title, learn = f"learning {kind}, {settings.vocabulary:,} subwords", partial(_learn, text, settings)
    model = stages.run("subwords", [text.name, settings.vocabulary], title, learn)
    subwords = KINDS[kind]((model / KINDS[kind].file).read_bytes(), settings.target)
    encode = partial(_encode, text, subwords, settings, workers)
    inputs = [model.name, settings.max_length, settings.max_ratio]
    encoded = stages.run("encoded", inputs, "cutting into subwords", encode)
    counts = json.loads((encoded / "pairs.json").read_text(encoding="utf-8"))
    print(_tell(counts, settings), flush=True)
    record = {"made from": {"text": digest, **asdict(settings)}, "pairs": counts}
    binarise = partial(_binarise, text, model, encoded, settings, workers, record)
    finished = stages.run("finished", [encoded.name], "binarising", binarise)
    if out.exists():
        out.rmdir()
    finished.rename(out)
    stages.clear()
    print(f"{out}: {settings.source} to {settings.target}, ready", flush=True)


class Stages:
    """Folders that appear under their names when they are whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: set[str] = set()

    def run(self, name: str, inputs: list[Any], title: str, make: Callable[[Path], None]) -> Path:
        """The folder that `make` fills, or that an earlier run with these inputs left."""
        digest = hashlib.sha256(json.dumps([VERSION, name, inputs]).encode()).hexdigest()
        path = self._folder / f"{name}-{digest[:16]}"
        self._kept.add(path.name)
        # The folder keeps one version of each stage.
        for other in self._folder.glob(f"{name}-*"):  # of other inputs, or interrupted
            if other.name not in self._kept:
                shutil.rmtree(other)
        if not path.exists():
            print(title, flush=True)
            unfinished = path.with_name(f"{path.name}.part")
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(path)
        return path

    def clear(self) -> None:
        """Removes the stages of `run`, and the folder if nothing else is in it."""
        for name in self._kept:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


def _clean(corpus: Corpus, kind: str, workers: int, folder: Path) -> None:
    """All splits as `prepare_lines` gives them; valid and test also as they came, as references."""
    for split in SPLITS:
        for language in (corpus.source, corpus.target):
            lines = map(clean, corpus.read(split, language))
            prepared = _spread(partial(prepare_lines, kind, language), lines, corpus.pairs[split], workers)
            write_text(folder / f"{split}.{language}", prepared)
            if split != "train":
                write_text(folder / f"raw.{split}.{language}", corpus.read(split, language))


def _learn(text: Path, settings: Settings, folder: Path) -> None:
    lines = (line for lang in (settings.source, settings.target) for line, _ in read_lines(text / f"train.{lang}"))
    kind = KINDS[settings.subwords]
    (folder / kind.file).write_bytes(kind.learn((line for line in lines if line), settings.vocabulary))


def _encode(text: Path, subwords: Subwords, settings: Settings, workers: int, folder: Path) -> None:
    """The splits in subwords, of train only the pairs that pass the filters; pairs.json counts the others."""
    languages = (settings.source, settings.target)
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    words: Counter[str] = Counter()
    for split in SPLITS:
        # An estimate of the lines is enough to choose between one process and several.
        size = sum(1 for _ in read_lines(text / f"{split}.{settings.source}"))
        sides = [
            _spread(subwords.encode, (line for line, _ in read_lines(text / f"{split}.{lang}")), size, workers)
            for lang in languages
        ]
        ours, theirs = ((folder / f"{split}.{lang}").open("w", encoding="utf-8", newline="\n") for lang in languages)
        with ours, theirs:
            for source, target in zip(*sides, strict=True):
                pair = source.split(), target.split()
                fault = _fault(len(pair[0]), len(pair[1]), settings) if split == "train" else None
                counts[split][fault or "kept"] += 1
                if not fault:
                    ours.write(f"{source}\n")
                    theirs.write(f"{target}\n")
                    if split == "train":
                        words.update(chain(*pair))
    if not counts["train"]["kept"]:
        raise UserError(f"no pair of the training text is left: {_tell(counts, settings)}")
    if subwords.dictionary is not None:
        _write_dictionary(folder / "dict.txt", subwords.dictionary, words)
    (folder / "pairs.json").write_text(json.dumps(counts), encoding="utf-8")


def _fault(source: int, target: int, settings: Settings) -> str | None:
    """Why a pair of sentences of so many subwords is not trained on."""
    if not (source and target):
        return "empty"
    if max(source, target) > settings.max_length:
        return "long"
    if max(source, target) > settings.max_ratio * min(source, target):
        return "ratio"
    return None


def _tell(counts: dict[str, Any], settings: Settings) -> str:
    train = counts["train"]
    return (
        f"train: {train.get('kept', 0):,} of {sum(train.values()):,} pairs kept; fell out: {train.get('empty', 0):,} "
        f"with an empty line, {train.get('long', 0):,} of more than {settings.max_length} subwords, "
        f"{train.get('ratio', 0):,} with a ratio above {settings.max_ratio:g}; "
        f"valid: {counts['valid'].get('kept', 0):,}, test: {counts['test'].get('kept', 0):,}"
    )


def _write_dictionary(path: Path, subwords: list[str], counts: Counter[str]) -> None:
    """fairseq's dictionary of all subwords, frequent ones first, filled up to a multiple of 8 as fairseq does."""
    # As in a dictionary that fairseq counts; ties stay in the model's order.
    order = sorted(subwords, key=lambda word: -counts[word])
    fill = -(len(order) + 4) % 8  # fairseq adds four symbols
    rows = [f"{word} {counts[word]}" for word in order] + [f"madeupword{i:04d} 0" for i in range(fill)]
    write_text(path, rows)


def _binarise(
    text: Path, model: Path, encoded: Path, settings: Settings, workers: int, record: dict[str, Any], folder: Path
) -> None:
    command = ["fairseq-preprocess", "--source-lang", settings.source, "--target-lang", settings.target]
    command += [word for split in SPLITS for word in (f"--{split}pref", str(encoded / split))]
    command += ["--destdir", str(folder), "--joined-dictionary", "--workers", str(workers)]
    if (encoded / "dict.txt").exists():
        command += ["--srcdict", str(encoded / "dict.txt")]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise UserError("fairseq-preprocess failed: " + "\n".join(result.stdout.splitlines()[-5:]))
    (folder / "preprocess.log").unlink(missing_ok=True)  # of times and places only
    shutil.copy(model / KINDS[settings.subwords].file, folder)
    (folder / "raw").mkdir()
    for path in text.glob("raw.*"):
        shutil.copy(path, folder / "raw" / path.name.removeprefix("raw."))
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _spread(function: Callable[[list[str]], list[str]], lines: Iterable[str], size: int, workers: int) -> Iterator[str]:
    """The lines through a function of many, in several processes if there are `size` lines and that is many."""
    rest = iter(lines)
    chunks = iter(lambda: list(islice(rest, CHUNK)), [])
    if workers == 1 or size <= CHUNK:
        for chunk in chunks:
            yield from function(chunk)
        return
    # In order, and at most two chunks a process ahead of the reader.
    with pool(workers) as processes:
        waiting: deque[AsyncResult[list[str]]] = deque()
        for chunk in chunks:
            waiting.append(processes.apply_async(function, [chunk]))
            if len(waiting) > 2 * workers:  # else all of the text would be in memory
                yield from waiting.popleft().get()
        while waiting:
            yield from waiting.popleft().get()


if __name__ == "__main__":
    sys.exit(main())
