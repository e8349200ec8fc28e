"""Curves in TensorBoard and wandb, which fairseq writes to if it is asked to."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fairseq.logging import progress_bar

from tests.conftest import train
from tests.tasks.conftest import losses

TWO_EPOCHS = "--max-epoch 2 --max-update 0 --batch-size 64 --log-interval 2".split()


@pytest.fixture(autouse=True)
def nothing_imported(our_fairseq, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(progress_bar, "wandb", None)
    monkeypatch.setattr(progress_bar, "SummaryWriter", None)
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})
    yield
    progress_bar._close_writers()


@pytest.mark.slow
def test_tensorboard_has_the_losses_of_a_training(corpus: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs what pip install '.[logging]' installs"
    )
    log = train(corpus, tmp_path / "out", *TWO_EPOCHS, "--tensorboard-logdir", str(tmp_path / "board"))
    progress_bar._close_writers()
    assert sorted(path.name for path in (tmp_path / "board").iterdir()) == ["train", "train_inner"]
    events = accumulator.EventAccumulator(str(tmp_path / "board" / "train_inner")).Reload()
    scalars = events.Scalars("loss")
    assert [round(scalar.value, 3) for scalar in scalars] == losses(log) and [x.step for x in scalars[:2]] == [2, 4]


@pytest.mark.slow
def test_wandb_has_one_run_of_a_training(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs what pip install '.[logging]' installs")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    try:
        train(corpus, tmp_path / "out", *TWO_EPOCHS, "--wandb-project", "mine")
        assert wandb.run.project == "mine" and wandb.run.name == "out" and wandb.run.step > 2
    finally:
        wandb.finish()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    assert b"train_inner/loss" in file.read_bytes() and b"train/ppl" in file.read_bytes()


@pytest.mark.parametrize("kind", ["missing", "broken"])
def test_a_recorder_that_cannot_be_imported_is_named_and_ends_nothing(kind, corpus, tmp_path, monkeypatch) -> None:
    for name in ("wandb", "tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if kind == "missing" or name != "wandb":
            monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "wandb.py").write_text("raise TypeError('it does not fit')\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--wandb-project", "mine", "--tensorboard-logdir", os.fspath(tmp_path / "board")]
    log = train(corpus, tmp_path / "out", "--max-update", "1", *flags)
    reason = "it does not fit" if kind == "broken" else "import of wandb halted"
    assert f"wandb_project is mine, but wandb cannot be imported and nothing is sent there: {reason}" in log
    assert f"tensorboard_logdir is {tmp_path}/board, but tensorboard cannot be imported" in log
    assert "done training" in log
