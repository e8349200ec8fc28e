"""examples/wmt14/ with fairseq, on a few hundred pairs: from raw text to a trained model, to BLEU and to the table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.examples.conftest import EXAMPLES, TINY, Reproduce, run_script, tiny
from tests.examples.wmt14.conftest import (
    MULTI30K,
    PREPARE,
    SUMMARY,
    Programs,
    corpus,
    generate,
    summarize,
)

TABLE = "schlag-table1"
TINY_TRAINING = "--cpu --num-workers 0 --max-update 1 --update-freq 1 --max-tokens 256".split()

# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture
def train(reproduce: Reproduce, tmp_path: Path) -> Callable[..., str]:
    """Trains a small model of a row in tmp_path / row for one update; returns the log."""

    def run(row: str, data: Path, *options: str) -> str:
        call = [TABLE, row, "train", data, tmp_path / row, *TINY_TRAINING, *tiny(TABLE, row), *options]
        status, log, err = reproduce(*call)
        assert status == 0 and "done training" in log, err
        return log

    return run


@pytest.mark.slow
def test_a_row_runs_from_raw_text_to_bleu_and_goes_on_where_it_stopped(data: Path, train, tmp_path: Path) -> None:
    train("linear", data)
    checkpoint = torch.load(tmp_path / "linear" / "checkpoint_best.pt", weights_only=False)
    assert checkpoint["cfg"]["checkpoint"]["best_checkpoint_metric"] == "bleu" and "best" in checkpoint["extra_state"]
    log = train("linear", data, "--max-update", "2", "--lr", "0.001", "--log-interval", "1")
    assert "Loaded checkpoint" in log and '"num_updates": "2"' in log

    out = tmp_path / "linear"
    evaluate = [EXAMPLES / "reproduce.py", TABLE, "linear", "evaluate", data, out]
    result = run_script(*evaluate, "--cpu", "--max-len-b", "5", "--beam", "2")
    assert result.returncode == 0, result.stderr
    for subset, count in (("valid", 6), ("test", 4)):
        assert len(corpus.read_text(out / f"generate-{subset}.hyp")) == count
        values = json.loads((out / f"generate-{subset}.json").read_text())
        assert values["sentences"] == count and values["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|")
        assert values["tokens_per_second"] > 0
    log = (out / "generate-test.log").read_text()
    assert {int(number) for number in re.findall(r"^H-(\d+)", log, re.MULTILINE)} == {0, 1, 2, 3}

    table = summarize(tmp_path)
    assert not table.stderr and "| linear | " in table.stdout and "| 25.5 |" in table.stdout


@pytest.mark.slow
def test_moses_tokens_and_bpe_go_from_raw_text_to_bleu(
    parallel: Path, train: Callable[..., str], tmp_path: Path, programs: Programs
) -> None:
    data, out = tmp_path / "data", tmp_path / "standard"
    result = run_script(PREPARE, data, parallel, env={"VOCABULARY": "60", "SUBWORDS": "bpe"})
    assert result.returncode == 0, result.stderr
    train("standard", data)
    # A generation that repeats the references.
    target = {f"H-{n}\t0\t{line}\n" for n, line in enumerate(subwords_of(data, "test.de"))}
    result, _ = generate(programs, data, out, [*target, SUMMARY])
    assert result.returncode == 0, result.stderr
    raw = corpus.read_text(data / "raw" / "test.de")
    texts = corpus.read_text(out / "generate-test.hyp")
    assert [texts[0], texts[3]] == [raw[0], raw[3]]
    assert texts[2] == raw[2].replace("日本", "<unk> <unk>")  # it has no bytes to fall back on


def subwords_of(data: Path, name: str) -> list[str]:
    """The lines of a text of binarised data."""
    from fairseq.data import Dictionary, data_utils

    split, language = name.split(".")
    dictionary = Dictionary.load(str(data / f"dict.{language}.txt"))
    dataset = data_utils.load_indexed_dataset(str(data / f"{split}.en-de.{language}"), dictionary)
    return [dictionary.string(dataset[i]) for i in range(len(dataset))]


@pytest.mark.slow
def test_the_comparison_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path) -> None:
    tiny = ["--", "--max-tokens", "256", *TINY["wmt14"]]
    env = {"UPDATES": "2", "SUBSETS": "test"}
    result = run_script(MULTI30K, data, tmp_path / "out", "dpfp", *tiny, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    table = summarize(tmp_path / "out").stdout
    assert "| dpfp | " in table and " | 2 | " in table and "tok:13a" in table and "paper" not in table
