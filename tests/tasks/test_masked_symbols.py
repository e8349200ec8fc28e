"""A model that masks symbols says so where they are in the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import QUIET, TASK, binarise, command, train

# Words that come once are <unk> to a dictionary with a threshold; "</s>" is the line's end, which is none.
TEXT = {"train": ["a b c a b c"] * 9 + ["x a y b"], "valid": ["a b c"] * 3, "test": ["a z b"]}
GPT2 = ["--arch", "fast_weight_lm_gpt2_small"]
WARNING = re.compile(r"split '(\w+)': (\S+) of the first (\S+) tokens are (.*), which the model never predicts")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`data(kind)`: `TEXT`, with a dictionary of frequent words ("threshold") or of all."""

    @cache
    def binarised(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        for split, lines in TEXT.items():
            lines = [line if kind == "threshold" else line.replace("z", "x") for line in lines]
            (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
        return binarise(folder, *(["--thresholdsrc", "2"] if kind == "threshold" else []))

    return binarised


def short_train(data: Path, folder: Path, *flags: str) -> str:
    return train(data, folder, "--max-update", "1", "--tokens-per-sample", "8", "--batch-size", "2", *flags)


CARRIED = ["--carry-over-state", "--no-token-positional-embeddings"]


@pytest.mark.parametrize(
    ("kind", "model", "carry"),
    [
        ("threshold", GPT2, []),
        pytest.param("threshold", ["--mask-special-symbols"], CARRIED, marks=pytest.mark.slow),
        pytest.param("threshold", [], [], marks=pytest.mark.slow),
        pytest.param("whole", GPT2, [], marks=pytest.mark.slow),
    ],
    ids=["gpt2", "masked, carried", "unmasked", "all words"],
)
def test_masked_symbols_in_the_text_are_told(data, tmp_path, kind, model, carry):
    unknown = kind == "threshold" and bool(model)
    log = short_train(data(kind), tmp_path, *model, *carry)
    expected = [("train", "2", str(9 * 7 + 5), "<unk>")] if unknown else []
    assert WARNING.findall(log) == expected
    assert ("each costs 10,000 nats" in log and "--arch fast_weight_lm has no mask" in log) == unknown
    path = ["--path", str(tmp_path / "checkpoint_last.pt"), "--tokens-per-sample", "8"]
    for split, found in (("test", [("test", "1", "4", "<unk>")]), ("valid", [])):
        log = command("eval_lm", str(data(kind)), *TASK, *QUIET, *path, "--gen-subset", split, *carry[:1])
        assert WARNING.findall(log) == (found if unknown else [])
        # What the warning is about.
        perplexity = re.search(r"Perplexity: (\S+)", log)
        assert perplexity is not None and (perplexity[1] == "inf") == bool(unknown and found)


@pytest.mark.parametrize("searched", [9 * 7, 9 * 7 + 1])
def test_only_the_beginning_of_a_split_is_searched(data, tmp_path, monkeypatch, searched):
    monkeypatch.setattr("fairseq_fastweights.tasks.fast_weight_language_modeling._SEARCHED", searched)
    found = [("train", "1", str(searched), "<unk>")] if searched > 9 * 7 else []
    assert WARNING.findall(short_train(data("threshold"), tmp_path, *GPT2, "--no-save")) == found


def test_data_that_must_be_loaded_first_is_searched_too(tmp_path):
    for split, lines in TEXT.items():
        (tmp_path / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
    binarise(tmp_path, "--thresholdsrc", "2", "--dataset-impl", "lazy")
    short_train(tmp_path / "bin", tmp_path, *GPT2, *CARRIED)
    flags = ["--tokens-per-sample", "8", "--context-window", "7", "--gen-subset", "test"]
    path = str(tmp_path / "checkpoint_last.pt")
    log = command("eval_lm", str(tmp_path / "bin"), *TASK, *QUIET, *flags, "--path", path)
    assert WARNING.findall(log) == [("test", "1", "4", "<unk>")]
