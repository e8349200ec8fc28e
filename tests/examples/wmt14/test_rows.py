"""The scripts of examples/wmt14/table1/: each asks fairseq for the settings of its row in the paper."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest

from tests.examples.conftest import options
from tests.examples.wmt14.conftest import ROWS, SUMMARIZE, Programs

PAPER: dict[str, tuple[float, float]] = runpy.run_path(str(SUMMARIZE))["PAPER"]


def test_there_is_a_script_for_each_row_of_the_table() -> None:
    assert sorted(ROWS) == sorted(PAPER)
    assert all(os.access(row, os.X_OK) for row in ROWS.values())


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_settings_of_the_paper(name: str, stub_data: Path, tmp_path: Path, programs: Programs) -> None:
    result, (train,) = programs.run(ROWS[name], "train", stub_data, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    asked = options(train)
    assert {key: asked[key] for key in asked if key in (
        "--fast-weight-attention", "--update-rule", "--feature-map", "--normalization", "--favor-features", "--dpfp-nu"
    )} == {
        "standard": {"--fast-weight-attention": "none"},
        "linear": {"--feature-map": "elu"},
        # Table 6, and d_dot = 2 m or 2 nu d_key with d_key = 64.
        "performer-64": {"--feature-map": "favor", "--favor-features": "32"},
        "performer-256": {"--feature-map": "favor", "--favor-features": "128"},
        "performer-512": {"--feature-map": "favor", "--favor-features": "256"},
        "dpfp-256": {"--feature-map": "dpfp", "--dpfp-nu": "2"},
        "dpfp-512": {"--feature-map": "dpfp", "--dpfp-nu": "4"},
    }[name] | ({} if name == "standard" else {
        "--fast-weight-attention": "encoder,decoder,cross", "--update-rule": "sum", "--normalization": "attention",
    })  # fmt: skip
    paper = {
        "--arch": "fast_weight_transformer_wmt_en_de_big", "--task": "translation", "--share-all-embeddings": "",
        "--optimizer": "adam", "--adam-betas": "(0.9, 0.98)", "--clip-norm": "0", "--weight-decay": "0",
        "--lr": "0.0005", "--lr-scheduler": "inverse_sqrt", "--warmup-updates": "4000", "--warmup-init-lr": "1e-07",
        "--dropout": "0.3", "--criterion": "label_smoothed_cross_entropy", "--label-smoothing": "0.1",
        "--max-tokens": "3584", "--max-epoch": "45",
        "--eval-bleu-remove-bpe": "sentencepiece", "--best-checkpoint-metric": "bleu",
    }  # fmt: skip
    assert {key: asked[key] for key in paper} == paper
    assert "--maximize-best-checkpoint-metric" in asked and "--eval-bleu" in asked
    assert json.loads(asked["--eval-bleu-args"]).items() >= {"beam": 4, "lenpen": 0.6}.items()
    assert f"BLEU {PAPER[name][0]} (valid), {PAPER[name][1]} (test) in the paper." in ROWS[name].read_text()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("1", "48", "3584")),
        ({"GPUS": "3"}, ("3", "16", "3584")),
        ({"GPUS": "8"}, ("8", "6", "3584")),
        ({"UPDATE_FREQ": "8"}, ("1", "8", "21504")),
        ({"GPUS": "7", "UPDATE_FREQ": "4"}, ("7", "4", "6144")),
    ],
)
def test_the_batch_is_divided_among_gpus_and_accumulated_batches(
    env: dict[str, str], expected: tuple[str, str, str], stub_data: Path, tmp_path: Path, programs: Programs
) -> None:
    _, (train,) = programs.run(ROWS["linear"], "train", stub_data, tmp_path / "out", env=env)
    asked = options(train)
    assert (asked["--distributed-world-size"], asked["--update-freq"], asked["--max-tokens"]) == expected
    assert expected[0] != "3" or expected == ("3", "16", "3584")  # the paper's own
    product = 1
    for factor in expected:
        product *= int(factor)
    assert product == 3 * 16 * 3584


def test_options_at_the_end_of_a_call_override_the_script(stub_data: Path, tmp_path: Path, programs: Programs) -> None:
    call = ["train", stub_data, tmp_path / "out", "--fp16", "--lr", "0.001", "--cpu"]
    _, (train,) = programs.run(ROWS["linear"], *call)
    assert options(train)["--lr"] == "0.001" and train[-4:] == ["--fp16", "--lr", "0.001", "--cpu"]
