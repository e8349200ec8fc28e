"""Parallel text as it comes: finding it, checking it, reading it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.files import SPLITS, UserError, read_lines

# Control characters, and marks of byte order.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ufeff]")


@dataclass(frozen=True)
class Corpus:
    """Three splits in two languages that were checked."""

    source: str
    target: str
    files: dict[tuple[str, str], Path]  # by split and language
    pairs: dict[str, int]  # lines by split
    digest: str  # of the languages and the whole text, compressed or not

    def read(self, split: str, language: str) -> Iterator[str]:
        """The lines as they came, without the line ends."""
        return (text for text, _ in read_lines(self.files[split, language]))


def survey(folder: Path, source: str, target: str) -> Corpus:
    """Finds {train,valid,test}.{source,target}[.gz] in a folder and reads all of it once. Raises UserError if a file
    is missing, there twice, damaged, empty or not UTF-8, or if two languages of a split have different numbers of
    lines.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if source == target:
        raise UserError(f"source and target are both {source}; they must be two languages")
    files = {(split, lang): _find(folder, f"{split}.{lang}") for split in SPLITS for lang in (source, target)}
    digest = hashlib.sha256(f"{source} {target}".encode())
    counts = {}
    # One pass finds the sizes, the digest and what cannot be decoded.
    for (split, language), path in files.items():
        counts[split, language] = 0
        digest.update(f"\0{split}.{language}\0".encode())
        for _, raw in read_lines(path):
            counts[split, language] += 1
            digest.update(raw)
        if not counts[split, language]:
            raise UserError(f"{path} is empty")
    for split in SPLITS:
        ours, theirs = counts[split, source], counts[split, target]
        if ours != theirs:
            raise UserError(
                f"{files[split, source]} has {ours} lines and {files[split, target]} has {theirs}; line by line, one "
                "must be the translation of the other"
            )
    return Corpus(source, target, files, {split: counts[split, source] for split in SPLITS}, digest.hexdigest())


def _find(folder: Path, name: str) -> Path:
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not found:
        raise UserError(f"{folder} holds neither {name} nor {name}.gz")
    if len(found) > 1:
        raise UserError(f"{folder} holds both {name} and {name}.gz; one of them must go")
    return found[0]


def write_text(path: Path, lines: Iterable[str]) -> int:
    """Writes lines to a file, and returns how many they were."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(f"{line}\n")
            count += 1
    return count


def clean(line: str) -> str:
    """A line without control characters, with one space between words.

    All white space of Unicode becomes such a space, since fairseq takes any for the end of a token.
    """
    return " ".join(_UNPRINTABLE.sub(" ", line).split())
