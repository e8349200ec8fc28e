"""Trained models of both kinds, a tiny parallel corpus, and fairseq's commands for translation on it."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conftest import QUIET, TASK, command, import_plugin, train

TRANSLATION = [*TASK[:2], "--task", "translation", "--source-lang", "en", "--target-lang", "de"]
SMALL = "--arch fast_weight_transformer_tiny --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --dropout 0".split()


Model = Callable[..., Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, fill)`: a folder that `fill` fills, once for all processes of the session."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def made(name: str, fill: Callable[[Path], object]) -> Path:
        folder, unfinished = shared / name, shared / f"{name}.unfinished"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                fill(unfinished)
                unfinished.rename(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def model(corpus: Path, once) -> Model:
    """`model(*flags)`: a checkpoint of a language model that has learned enough for contexts to matter."""

    def trained(*flags: str) -> Path:
        name = re.sub(r"[^\w,.]+", "_", "".join(("model", *flags)))
        return once(name, lambda folder: train(corpus, folder, "--max-update", "40", *flags)) / "checkpoint_last.pt"

    return trained


@dataclass(frozen=True)
class Corpus:
    """Binarised, and as text."""

    data: Path
    text: dict[str, list[str]]

    def lines(self, split: str, language: str) -> list[str]:
        return self.text[f"{split}.{language}"]


def translated(line: str) -> str:
    """Word by word, in reverse; of nothing there is one word, as fairseq takes no empty prefixes."""
    return " ".join(word.replace("e", "d") for word in reversed(line.split())) or "d0"


def binarise_pairs(folder: Path, text: dict[str, list[str]], *flags: str) -> Path:
    """Runs fairseq-preprocess on pairs of files and returns where its output is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in text.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", str(folder / split))]
    languages = ["--source-lang", "en", "--target-lang", "de"]
    command("preprocess", *languages, "--destdir", str(folder / "bin"), *prefixes, *flags)
    return folder / "bin"


@pytest.fixture(scope="session")
def plugin() -> None:
    """The plugin as --user-dir brings it."""
    import_plugin()


@pytest.fixture(scope="session")
def pair_text() -> dict[str, list[str]]:
    """Sentences of 20 words; the 3rd of each split and some others are empty in the source."""
    draw, text = random.Random(0), {}
    for split, size in (("train", 80), ("valid", 12), ("test", 12)):
        source = [" ".join(draw.choices([f"e{i}" for i in range(20)], k=draw.randint(1, 9))) for _ in range(size)]
        source[2::20] = [""] * len(source[2::20])
        text[f"{split}.en"], text[f"{split}.de"] = source, [translated(line) for line in source]
    return text


@pytest.fixture(scope="session")
def pairs(plugin, pair_text, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(binarise_pairs(tmp_path_factory.mktemp("pairs"), pair_text), pair_text)


@pytest.fixture(scope="session")
def joined_pairs(plugin, pair_text, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The same with one dictionary for both languages."""
    folder = tmp_path_factory.mktemp("joined")
    return Corpus(binarise_pairs(folder, pair_text, "--joined-dictionary"), pair_text)


def train_translation(data: Path, save_dir: Path, *flags: str, validate: bool = False) -> str:
    """Four updates of a small model, unless the flags say otherwise."""
    defaults = "--optimizer adam --lr 0.003 --max-tokens 160 --max-update 4 --seed 1".split()
    defaults += [] if validate else ["--disable-validation"]
    criterion = "--criterion label_smoothed_cross_entropy --label-smoothing 0.1".split()
    arguments = [*TRANSLATION, *SMALL, *QUIET, *defaults, *criterion, "--save-dir", str(save_dir), *flags]
    return command("train", str(data), *arguments)


SAME_MODEL = "--update-rule delta --feature-map dpfp".split()
"""As `translator` is."""


@pytest.fixture(scope="session")
def translator(pairs, once) -> Path:
    """A folder with the checkpoints of epochs 3, 6 and 9, of 4 updates each."""
    flags = [*SAME_MODEL, "--max-update", "36", "--save-interval", "3"]
    return once("translator", lambda folder: train_translation(pairs.data, folder, *flags))


@dataclass(frozen=True)
class Hypothesis:
    score: float
    words: list[str]
    token_scores: list[float]  # base 2, rounded to 4 digits


def hypotheses_in(output: str) -> dict[int, list[Hypothesis]]:
    """By the sentence's number, best first."""
    found: dict[int, list[Hypothesis]] = {}
    lines = iter(output.splitlines())
    for line in lines:
        match = re.fullmatch(r"H-(\d+)\t(\S+)\t(.*)", line)
        if match:
            next(lines)  # D-
            scores = next(lines).split("\t")[1].split()
            hypothesis = Hypothesis(float(match[2]), match[3].split(), [float(x) for x in scores])
            found.setdefault(int(match[1]), []).append(hypothesis)
    return found


def generate(data: Path, path: str | Path, results: Path, *flags: str) -> dict[int, list[Hypothesis]]:
    """Runs fairseq-generate on the test split, with a beam of 4 unless the flags say otherwise."""
    shutil.rmtree(results, ignore_errors=True)
    defaults = ["--path", str(path), "--beam", "4", "--max-len-b", "12", "--results-path", str(results)]
    command("generate", str(data), *TRANSLATION, *QUIET, "--batch-size", "5", *defaults, *flags)
    (output,) = results.iterdir()
    return hypotheses_in(output.read_text(encoding="utf-8"))
