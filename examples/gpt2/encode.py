#!/usr/bin/env python
"""Cuts text into the subwords of a converted model, a document a line. See prepare.sh.

    encode.py SOURCE FOLDER OUT [--train-tokens N] [--valid-tokens N] [--test-tokens N] [--workers N]

Makes OUT/{train,valid,test}.bpe of the text in FOLDER, which may be without test. Beside a file that is whole lies a
record of its sources, as OUT/train.json; it is not made again of the same. OUT/words.json has the words and the
subwords of each split, line ends among them.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import ArgumentParser, positive, run_to_the_end
from common.files import UserError, open_new, read_lines, write_whole
from common.processes import pool

ROOT = Path(__file__).resolve().parents[2]
SEPARATOR = "<|endoftext|>"
"""The line between two documents of a text file."""
KINDS = tuple(f".{kind}{packed}" for kind in ("txt", "jsonl") for packed in ("", ".gz", ".zst"))
NAMES = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}
"""Names of the files, or folders of files, of a split."""
OPTIONAL = "test"
TOKENIZER = ("tokenizer.json", "tokenizer_words.json")
"""The files of a tokenizer that from-huggingface writes."""
_DOCUMENTS = 64
"""For each process at a time."""


def main(arguments: list[str] | None = None) -> int:
    """Encodes all splits; returns the exit status."""
    parser = ArgumentParser(description="Cuts text into the subwords of a converted model.")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the converted model's folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="has the text")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder for the encoded text")
    for split in NAMES:
        parser.add_argument(
            f"--{split}-tokens", type=positive, metavar="N", help="take no more documents after so many"
        )
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes")
    options = parser.parse_args(arguments)

    def work() -> None:
        files = {split: find_files(options.folder, split) for split in NAMES}  # before any work
        counts = {}
        for split, paths in files.items():
            most = getattr(options, f"{split}_tokens")
            if paths:
                counts[split] = encode_split(options.source, paths, options.out / f"{split}.bpe", most, options.workers)
        write_whole(options.out / "words.json", json.dumps(counts) + "\n")

    return run_to_the_end(work)


def find_files(folder: Path, split: str) -> list[Path]:
    """The files of a split in the order of their names: those called after it, and all in a folder called after it.
    Raises UserError if there is none.
    """
    found = [
        path
        for name in NAMES[split]
        for path in [*(folder / f"{name}{kind}" for kind in KINDS), *sorted((folder / name).glob("*"))]
        if path.is_file() and path.name.endswith(KINDS)
    ]
    if not found and split != OPTIONAL:
        raise UserError(
            f"{folder} holds no {' or '.join(NAMES[split])}, neither a file nor a folder of files; they must be "
            f"{', '.join(KINDS)}"
        )
    return found


def encode_split(source: Path, paths: list[Path], out: Path, most: int | None, workers: int) -> dict[str, int]:
    """Writes the documents of some files as subwords, one a line, until there are `most` tokens with line ends. Returns
    how many "words" and "subwords" these are. Raises UserError if there is no document, or a file cannot be read.
    """
    record = out.with_suffix(".json")
    made_from = {
        "tokenizer": [(source / name).read_text(encoding="utf-8") for name in TOKENIZER],
        "files": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths],
        "tokens": most,
    }
    # Times in nanoseconds, sizes and the tokenizer tell whether the sources are still the same.
    before = json.loads(record.read_text()) if record.exists() else {}
    if before.get("made from") == made_from:
        print(f"{out} is there")
        return before["counts"]
    record.unlink(missing_ok=True)
    part = out.with_name(f"{out.name}.part")
    written = tokens = words = 0
    with open_new(part) as file:
        for line, count in _encode_all(chain.from_iterable(map(documents, paths)), source, workers):
            file.write(f"{line}\n".encode("ascii"))
            written += 1
            words += count
            # A space between two tokens; the line end is one, too.
            tokens += line.count(" ") + 2
            if most is not None and tokens >= most:
                break
    if not written:
        raise UserError(f"{', '.join(map(str, paths))}: there is no text")
    part.replace(out)
    counts = {"words": words, "subwords": tokens}
    write_whole(record, json.dumps({"made from": made_from, "counts": counts}))
    print(f"{out}: {written:,} documents, {tokens:,} tokens with an end for each")
    return counts


def documents(path: Path) -> Iterator[str]:
    """The documents of a file; those with nothing in them are left out. Raises UserError naming the file, and the line
    if that is to blame.
    """
    found = _in_json_lines(path) if ".jsonl" in path.name else _between_separators(path)
    return (document for document in found if document.strip())


def _in_json_lines(path: Path) -> Iterator[str]:
    for number, (line, _) in enumerate(read_lines(path), 1):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UserError(f"{path}: line {number} is no JSON object with a text in it")
        yield text


def _between_separators(path: Path) -> Iterator[str]:
    document: list[bytes] = []
    for line, raw in read_lines(path):
        if line == SEPARATOR:
            yield _text(document)
            document = []
        else:
            document.append(raw)
    yield _text(document)


def _text(document: list[bytes]) -> str:
    return b"".join(document).decode().removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def load_tokenizer(source: Path) -> Callable[[str], str]:
    """A function that turns a text into the numbers of its subwords, joined by spaces."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from fairseq_fastweights.data.tokenizer_json import TokenizerJson

    return TokenizerJson(Namespace(tokenizer_json_folder=str(source))).encode


_tokenizer: Callable[[str], str]


def _start_worker(source: Path) -> None:
    global _tokenizer
    _tokenizer = load_tokenizer(source)


def _encode(document: str) -> tuple[str, int]:
    return _tokenizer(document), len(document.split()) + document.count("\n") + 1


def _encode_all(texts: Iterator[str], source: Path, workers: int) -> Iterator[tuple[str, int]]:
    """Encodes texts, in order, without reading far ahead, and counts words with line ends."""
    _start_worker(source)  # its imports and its errors, once and here
    if workers == 1:
        yield from map(_encode, texts)
        return
    # A batch at a time: `imap` would read all texts ahead.
    with pool(workers, _start_worker, source) as processes:
        while batch := list(islice(texts, _DOCUMENTS * workers)):
            yield from processes.map(_encode, batch, chunksize=8)


if __name__ == "__main__":
    sys.exit(main())
