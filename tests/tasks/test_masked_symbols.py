"""A model that masks symbols says so where they are in the text."""

import re
from pathlib import Path

import pytest

from tests.conftest import QUIET, TASK, binarise, command, train
from tests.tasks.conftest import slow

# Words that come once are <unk> to a dictionary with a threshold; "</s>" is the line's end, which is none.
TEXT = {"train": ["a b c a b c"] * 9 + ["x a y b"], "valid": ["a b c"] * 3, "test": ["a z b"]}
GPT2 = ["--arch", "fast_weight_lm_gpt2_small"]
CARRIED = ["--carry-over-state", "--no-token-positional-embeddings"]
WARNING = re.compile(r"split '(\w+)': (\S+) of the first (\S+) tokens are (.*), which the model never predicts")


def short_train(folder: Path, *flags: str, **of_data: str) -> tuple[Path, str]:
    """The text, binarised, and the log of an update."""
    for split, lines in TEXT.items():
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
    data = binarise(folder, "--thresholdsrc", "2", "--dataset-impl", of_data.get("kind", "mmap"))
    return data, train(data, folder, *"--max-update 1 --tokens-per-sample 8 --batch-size 2".split(), *flags)


@pytest.mark.parametrize(
    ("kind", "model", "reading"),
    [
        ("mmap", GPT2, []),
        # Lines that must be loaded before they can be searched.
        ("lazy", [*GPT2, *CARRIED], ["--context-window", "7"]),
        slow("mmap", ["--mask-special-symbols", *CARRIED], CARRIED[:1]),
        slow("mmap", [], []),
    ],
    ids=["gpt2", "lazy", "masked, carried", "unmasked"],
)
def test_masked_symbols_in_the_text_are_told(tmp_path, kind, model, reading):
    data, log = short_train(tmp_path, *model, kind=kind)
    told = bool(model)
    assert WARNING.findall(log) == [("train", "2", str(9 * 7 + 5), "<unk>")] * told
    assert ("each costs 10,000 nats" in log and "--arch fast_weight_lm has no mask" in log) == told
    flags = ["--path", str(tmp_path / "checkpoint_last.pt"), "--tokens-per-sample", "8", *reading]
    for split, found in (("test", told), ("valid", False)):
        log = command("eval_lm", str(data), *TASK, *QUIET, *flags, "--gen-subset", split)
        assert WARNING.findall(log) == [("test", "1", "4", "<unk>")] * found
        # The reason for the warning.
        assert ("Perplexity: inf" in log) == found and "Perplexity: " in log


@pytest.mark.parametrize("searched", [9 * 7, 9 * 7 + 1])
def test_only_the_beginning_of_a_split_is_searched(tmp_path, monkeypatch, searched):
    monkeypatch.setattr("fairseq_fastweights.tasks.fast_weight_language_modeling._SEARCHED", searched)
    found = [("train", "1", str(searched), "<unk>")] * (searched > 9 * 7)
    assert WARNING.findall(short_train(tmp_path, *GPT2, "--no-save")[1]) == found
