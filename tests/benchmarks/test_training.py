"""What training.py measures is a training that fairseq-train makes, and what it has measured is not lost."""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import training

from tests.conftest import ROOT, binarise, command

# The paper's model and batch, for a second of one core: of options that are given twice the last one counts.
SMALLER = """--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2
    --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --batch-size 2 --tokens-per-sample 16
    --max-update 2 --log-interval 1""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binarised text of 40 word types."""
    folder = tmp_path_factory.mktemp("training")
    draw = random.Random(0)
    for split, size in (("train", 500), ("valid", 20)):
        (folder / f"{split}.txt").write_text(" ".join(draw.choices([f"w{i}" for i in range(40)], k=size)) + "\n")
    return binarise(folder)


@pytest.mark.parametrize("model", training.MODELS)
def test_the_training_that_is_measured_is_one_that_fairseq_makes(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where --user-dir is
    options = Namespace(device="cpu", precision="fp32", backend="auto", quick=False)
    flags = training.training_flags(model, training.SETTINGS, options)
    command("train", str(data), *flags, *SMALLER)


def test_a_training_is_on_one_gpu() -> None:
    options = Namespace(device="cuda", precision="bf16", backend="auto", quick=False)
    flags = training.training_flags("delta", training.SETTINGS, options)
    assert flags[flags.index("--distributed-world-size") + 1] == "1" and "--cpu" not in flags


@pytest.mark.parametrize(
    ("done", "left"),
    [
        (2, {"softmax": 1, "delta": 1}),
        (5, {"softmax": 2, "delta": 2, "sum": 1}),
    ],
)
def test_a_training_that_fails_leaves_what_was_measured_before(
    done: int, left: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train(data: Path, model: str, *_: object) -> list[float]:
        if len(trained) == done:
            sys.exit("fairseq-train failed")
        trained.append(model)
        return [100.0]

    monkeypatch.setattr(training, "prepare", lambda folder, settings: folder)
    monkeypatch.setattr(training, "train", train)
    out = tmp_path / "training.json"
    monkeypatch.setattr(
        sys, "argv", ["training.py", "--quick", "--models", "delta,sum", "--rounds", "2", "--out", str(out)]
    )
    with pytest.raises(SystemExit, match="fairseq-train failed"):
        training.main()
    rows = {row["model"]: row["words per second"]["rounds"] for row in json.loads(out.read_text())["rows"]}
    assert rows == left
    assert [path.name for path in tmp_path.iterdir()] == ["training.json"]
