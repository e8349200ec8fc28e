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
THRESHOLD = "--thresholdsrc 2"
GPT2 = ["--arch", "fast_weight_lm_gpt2_small"]
CARRIED = ["--carry-over-state", "--no-token-positional-embeddings"]
WARNING = re.compile(r"split '(\w+)': (\S+) of the first (\S+) tokens are (.*), which the model never predicts")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`data(flags)`: `TEXT`, binarised; with a dictionary of all words where there is no threshold."""

    @cache
    def binarised(flags: str) -> Path:
        folder = tmp_path_factory.mktemp("text")
        for split, lines in TEXT.items():
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{split}.txt").write_text(text if flags else text.replace("z", "x"))
        return binarise(folder, *flags.split())

    return binarised


def short_train(data: Path, folder: Path, *flags: str) -> str:
    return train(data, folder, "--max-update", "1", "--tokens-per-sample", "8", "--batch-size", "2", *flags)


@pytest.mark.parametrize(
    ("dictionary", "model", "reading"),
    [
        (THRESHOLD, GPT2, []),
        # Lines that must be loaded before they can be searched.
        (f"{THRESHOLD} --dataset-impl lazy", [*GPT2, *CARRIED], ["--context-window", "7"]),
        pytest.param(THRESHOLD, ["--mask-special-symbols", *CARRIED], CARRIED[:1], marks=pytest.mark.slow),
        pytest.param(THRESHOLD, [], [], marks=pytest.mark.slow),
        pytest.param("", GPT2, [], marks=pytest.mark.slow),
    ],
    ids=["gpt2", "lazy", "masked, carried", "unmasked", "all words"],
)
def test_masked_symbols_in_the_text_are_told(data, tmp_path, dictionary, model, reading):
    told = bool(dictionary and model)
    log = short_train(data(dictionary), tmp_path, *model)
    assert WARNING.findall(log) == [("train", "2", str(9 * 7 + 5), "<unk>")] * told
    assert ("each costs 10,000 nats" in log and "--arch fast_weight_lm has no mask" in log) == told
    flags = ["--path", str(tmp_path / "checkpoint_last.pt"), "--tokens-per-sample", "8", *reading]
    for split, found in (("test", told), ("valid", False)):
        log = command("eval_lm", str(data(dictionary)), *TASK, *QUIET, *flags, "--gen-subset", split)
        assert WARNING.findall(log) == [("test", "1", "4", "<unk>")] * found
        # What the warning is about.
        assert ("Perplexity: inf" in log) == found and "Perplexity: " in log


@pytest.mark.parametrize("searched", [9 * 7, 9 * 7 + 1])
def test_only_the_beginning_of_a_split_is_searched(data, tmp_path, monkeypatch, searched):
    monkeypatch.setattr("fairseq_fastweights.tasks.fast_weight_language_modeling._SEARCHED", searched)
    found = [("train", "1", str(searched), "<unk>")] * (searched > 9 * 7)
    assert WARNING.findall(short_train(data(THRESHOLD), tmp_path, *GPT2, "--no-save")) == found
