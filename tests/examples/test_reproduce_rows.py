"""The rows of the papers' tables, run by examples/reproduce.py on small models: they train, and are scored.

The options at a call's end cut the models down.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .conftest import EXAMPLES, TRAINING, Reproduce, reproduce_command, run_script, tiny

TABLES = reproduce_command.TABLES
TARGET, BASE = ("mao-table2", "gpt2"), ("mao-table3", "base")
LIT = ("choi-table3", "wo-lit")
EVALUATION = ["--cpu", "--num-workers", "0", "--tokens-per-sample", "16"]
MEMORY = ("--update-rule", "--feature-map", "--normalization", "--feature-dim")

# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.slow]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=False)["model"]


@pytest.fixture
def train(request: pytest.FixtureRequest, reproduce: Reproduce):
    """Trains a small model of a row in `out` for two updates; returns the log."""

    def run(table: str, row: str, out: Path, *options: object, places: list[str] | None = None, **env: str) -> str:
        experiment = {"mao-table3": ["published", "numbered"]}.get(table)
        experiment = experiment or {"wikitext103": ["data"], "gpt2": ["target", "gpt2_data"], "xatl": ["pythia", "pythia_data"]}[TABLES[table].folder]
        folders = [request.getfixturevalue(name) for name in places or experiment]
        status, log, err = reproduce(table, row, "train", *folders, out, *TRAINING, *tiny(table, row), *options, **env)
        assert status == 0, err
        return log

    return run


@pytest.fixture(scope="module")
def target(gpt2: Path, gpt2_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target model of Mao's Tables 1 and 2, run as a person runs it."""
    out = tmp_path_factory.mktemp("target") / "out"
    words = [*TARGET, "train", gpt2, gpt2_data, out, *TRAINING, *tiny(*TARGET)]
    result = run_script(EXAMPLES / "reproduce.py", *words, env={"PRECISION": "fp32"})
    assert result.returncode == 0, result.stderr
    assert "done training" in result.stdout and (out / "train.log").read_text() == result.stdout
    return out


ROWS = [
    (name, row)
    for name, table in TABLES.items()
    for row in table.rows
    if table.folder != "wmt14" and (name, row) not in (TARGET, BASE, LIT)
]


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda name: name)
def test_a_row_trains(table: str, row: str, train, tmp_path: Path) -> None:
    train(table, row, tmp_path / "out", PRECISION="fp32")
    assert all(x.isfinite().all() for x in weights(tmp_path / "out" / "checkpoint_best.pt").values() if x.is_floating_point())
