"""The text that the demo learns from: English that Python itself carries, or a user's own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from common.files import SPLITS, UserError, read_lines

HELD_OUT = 0.1
"""The share of the English corpus that goes to valid, and to test."""
REPEATED = 8
"""A paragraph of at least this many words that occurs twice was copied; shorter ones (headings) may coincide."""
WIDTH = 70
"""The column at which the articles are wrapped."""

FEWEST_TOKENS = 100
"""Of a split: enough for every stream of a batch to have some."""

_TOKEN = re.compile(r"\w+(?:['’]\w+)*|([^\w\s])\1*")
_RULER = re.compile(r"\W{4,}")
_BULLET = re.compile(r"([*\-•]|\d+\.|\[\d+\])\s+")


def split_english(articles: dict[str, str] | None = None) -> dict[str, list[str]]:
    """Python's own articles on its language, tokenised, in three splits that share no text.

    Many of the articles are sections of longer ones. Those that share a paragraph form a family, which goes to one
    split as a whole, and each paragraph is kept once: a test text that was in the training text too would reward
    learning by heart.

    `articles`: texts by name; those of `pydoc_data.topics` by default. Returns lines for each of `SPLITS`; tokens are
    separated by single spaces.
    """
    if articles is None:
        articles = topics
    paragraphs = {name: _paragraphs(articles[name]) for name in sorted(articles)}
    seen: set[str] = set()
    families = []
    for family in _families(paragraphs):
        lines: list[str] = []
        for name in family:
            for paragraph in paragraphs[name]:
                if not (_is_long(paragraph) and _flat(paragraph) in seen):
                    seen.add(_flat(paragraph))
                    lines += paragraph
        families.append((family, lines))
    # By a digest of the name: as good as drawn by lot, and the same on every machine.
    families.sort(key=lambda family: hashlib.sha256(family[0][0].encode()).digest())
    # Test and valid take the first families that have room; the rest is for training.
    room = HELD_OUT * sum(_count(lines) for _, lines in families)
    splits: dict[str, list[str]] = {split: [] for split in SPLITS}
    for _, lines in families:
        for split in ("test", "valid"):
            if _count(splits[split]) + _count(lines) <= room:
                splits[split] += lines
                break
        else:
            splits["train"] += lines
    return splits


def _families(paragraphs: dict[str, list[list[str]]]) -> list[list[str]]:
    """Groups the names of articles that share a long paragraph, directly or through others."""
    family_of = {name: [name] for name in paragraphs}
    first_with: dict[str, str] = {}
    for name, texts in paragraphs.items():
        for paragraph in texts:
            if not _is_long(paragraph):
                continue
            # Union of the two families, by the first article that had this paragraph.
            mine, other = family_of[name], family_of[first_with.setdefault(_flat(paragraph), name)]
            if mine is not other:
                other += mine
                family_of.update(dict.fromkeys(mine, other))
    unique = {id(family): family for family in family_of.values()}
    return [sorted(family) for family in unique.values()]


def _paragraphs(article: str) -> list[list[str]]:
    """The paragraphs of an article, each as its lines, tokenised, with wrapped lines put together again."""
    found = []
    for block in re.split(r"\n\s*\n", article):
        lines: list[str] = []
        end = indent = 0  # of the last line: where it ended, and where its text began
        for line in block.rstrip().split("\n"):
            words = line.split()
            if not words or _RULER.fullmatch(line):
                continue
            start = len(line) - len(line.lstrip())
            # The break was made by wrapping if the next word did not fit.
            prose = words[0][0] not in "|>#"  # rows of tables, examples of code
            if lines and prose and start == indent and end + 1 + len(words[0]) > WIDTH:
                lines[-1] += f" {tokenize(line)}"
            else:
                lines.append(tokenize(line))
                bullet = _BULLET.match(line.lstrip())
                indent = start + (len(bullet[0]) if bullet else 0)
            end = len(line)
        if lines:
            found.append(lines)
    return found


def tokenize(text: str) -> str:
    """Puts spaces between words and punctuation marks; a row of equal marks stays together."""
    return " ".join(match[0] for match in _TOKEN.finditer(text))


def _flat(paragraph: list[str]) -> str:
    return " ".join(paragraph)


def _is_long(paragraph: list[str]) -> bool:
    return _count(paragraph) - len(paragraph) >= REPEATED


def _count(lines: list[str]) -> int:
    """The number of tokens, line ends included, as fairseq counts."""
    return sum(line.count(" ") + 2 for line in lines)


@dataclass(frozen=True)
class Corpus:
    """Three texts, as lines of tokens that are separated by single spaces."""

    origin: str
    lines: Callable[[str], Iterator[str]]
    tokens: dict[str, int]
    digest: str

    def write(self, folder: Path) -> None:
        """Writes train.txt, valid.txt and test.txt."""
        for split in SPLITS:
            with (folder / f"{split}.txt").open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in self.lines(split))


def english_corpus() -> Corpus:
    """`split_english` of Python's own articles."""
    splits = split_english()
    return _survey("English from pydoc_data.topics", lambda split: iter(splits[split]))


def corpus_in(folder: Path) -> Corpus:
    """A user's texts, taken as they are: tokens stand between white space. Raises UserError if a file is
    missing, there twice, empty, too short or no UTF-8 text.
    """
    files = find_texts(folder)
    corpus = _survey(str(folder), lambda split: _read(files[split]))
    for split, tokens in corpus.tokens.items():
        if tokens < FEWEST_TOKENS:
            raise UserError(f"{files[split]} holds {tokens} tokens; it must hold at least {FEWEST_TOKENS}")
    return corpus


def find_texts(folder: Path) -> dict[str, Path]:
    """The file of each split in a user's folder; raises UserError if it is no folder, or lacks one or has two."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    return {split: _find(folder, split) for split in SPLITS}


def _find(folder: Path, split: str) -> Path:
    names = [split, f"{split}.txt", f"wiki.{split}.tokens"]
    names += [f"{name}.gz" for name in names]
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise UserError(f"{folder} has no text for {split}: it must hold one of {', '.join(names)}")
    if len(found) > 1:
        raise UserError(f"{folder} has more than one text for {split}: {', '.join(p.name for p in found)}")
    return found[0]


def _read(path: Path) -> Iterator[str]:
    """The lines of a file, with one space between tokens; a mark of byte order is no part of the text."""
    empty = True
    for line, _ in read_lines(path):
        words = line.lstrip("\ufeff").split()
        empty &= not words
        yield " ".join(words)
    if empty:
        raise UserError(f"{path} is empty")


def _survey(origin: str, lines: Callable[[str], Iterator[str]]) -> Corpus:
    """Reads all of a corpus once, for its size, its digest and its errors."""
    digest = hashlib.sha256()
    tokens = dict.fromkeys(SPLITS, 0)
    for split in SPLITS:
        for line in lines(split):
            digest.update(f"{line}\n".encode())
            tokens[split] += len(line.split()) + 1
        digest.update(b"\0")
    return Corpus(origin, lines, tokens, digest.hexdigest())
