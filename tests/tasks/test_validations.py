"""Which checkpoint is the best, and when a run stops: as in one that was never interrupted, whatever the losses are."""

import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig, FairseqConfig
from faults import differences, trained

from tests.conftest import QUIET, SMALL_MODEL, TASK, command
from tests.tasks.test_resuming import CARRY

pytestmark = pytest.mark.usefixtures("our_fairseq")
NAN, INF = math.nan, math.inf


class Run:
    """The work of fairseq-train with validation losses, without a model."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from fairseq_cli import train as program

        self.program = program
        self.cfg = FairseqConfig(checkpoint=CheckpointConfig(save_dir=str(folder), no_epoch_checkpoints=True))
        vars(self.cfg.checkpoint).update(options)
        self.folder, self.updates = folder, 0
        self.trainer = Mock(data_parallel_rank=0, data_parallel_world_size=1, checkpoint_suffix="")
        self.trainer.get_num_updates = lambda: self.updates
        self.trainer._previous_training_time = 3600.0
        self.trainer.save_checkpoint = lambda path, extra: torch.save({"updates": self.updates, **extra}, path)
        self.trainer.load_checkpoint.side_effect = lambda path, *ignored, **named: (
            torch.load(path) if Path(path).exists() else None
        )
        self.trainer.get_train_iterator.return_value.epoch = 1

    def start(self) -> str | None:
        """The reason that ends it before it has begun."""
        self.updates = (checkpoint_utils.load_checkpoint(self.cfg.checkpoint, self.trainer)[0] or {}).get("updates", 0)
        return self.program.why_finished(self.cfg, self.trainer)

    def validate(self, loss: float | None) -> bool:
        """True if it stops, with a checkpoint in any case."""
        self.updates += 1
        place = SimpleNamespace(
            epoch=1, end_of_epoch=lambda: True, state_dict=lambda: {"epoch": 2, "iterations_in_epoch": 0, "version": 2}
        )
        stops = self.program.should_stop_early(self.cfg, loss)
        checkpoint_utils.save_checkpoint(self.cfg.checkpoint, self.trainer, place, loss)
        return stops

    def best(self, name: str = "checkpoint_best.pt") -> int | None:
        """The updates of the best checkpoint."""
        return torch.load(self.folder / name)["updates"] if (self.folder / name).exists() else None


LOSSES = [
    # Losses, whether the largest is the best, the update of the best, and after which --patience 3 stops.
    ([2.0, NAN, 3.0, 2.5], False, 1, 4),
    ([NAN, NAN, 3.0, 2.5, 9.0], False, 4, None),
    ([NAN, NAN, NAN], False, None, 3),
    ([NAN, 1.0, None, 0.5, NAN, 0.7, None, 0.6], True, 2, 6),
    ([INF, 3.0, INF, NAN, 4.0], False, 2, 5),
    ([-INF, -3.0, -INF, -4.0, 5.0], True, 5, None),
    ([3.0, 2.0, 2.0, 2.1, None, 2.0], False, 6, 6),  # of equal ones the last is kept
]


@pytest.mark.parametrize("resumes", ["never", "always"])
@pytest.mark.parametrize(("losses", "largest", "best", "last"), LOSSES)
def test_the_best_is_kept_and_the_run_stops_when_it_should(tmp_path, losses, largest, best, last, resumes):
    run = Run(tmp_path, maximize_best_checkpoint_metric=largest, patience=3)
    stopped = None
    for loss in losses:
        if resumes == "always" or not run.updates:
            assert run.start() is None
        if run.validate(loss):
            stopped = run.updates
            break
    assert (run.best(), stopped) == (best, last)
    # The same command once more.
    finished = Run(tmp_path, maximize_best_checkpoint_metric=largest, patience=3).start()
    assert finished == (last and "the last 3 validations brought nothing better; --patience is 3")
    assert Run(tmp_path, maximize_best_checkpoint_metric=largest, patience=4).start() is None


BEGINNINGS = [
    # Of a run in another folder or a copy of the first one's, and whether it is the one that goes on.
    ("other", {"restore_file": "first/checkpoint_last.pt"}, False),  # on other data
    ("other", {}, False),  # in the same process
    ("copy", {"reset_meters": True}, False),
    ("copy", {"reset_optimizer": True}, False),
    ("copy", {"best_checkpoint_metric": "ppl"}, False),
    ("copy", {"restore_file": "copy/checkpoint_last.pt"}, True),
    ("copy", {"reset_dataloader": True}, True),
]


@pytest.mark.parametrize(("folder", "options", "goes_on"), BEGINNINGS)
def test_only_a_run_that_goes_on_knows_the_best_checkpoint(tmp_path, monkeypatch, folder, options, goes_on):
    monkeypatch.chdir(tmp_path)
    first = Run(tmp_path / "first", patience=3)
    first.start()
    for loss in (1.0, 2.0, 2.0):
        first.validate(loss)
    if folder == "copy":
        shutil.copytree("first", "copy")
    run = Run(tmp_path / folder, patience=3, **options)
    run.start()
    assert run.validate(5.0) == goes_on and run.best() == (1 if goes_on else run.updates)


def test_a_checkpoint_of_before_knows_the_best_loss_alone(tmp_path):
    for best, update in ((1.0, None), (NAN, 8)):
        run = Run(tmp_path / str(best), patience=2)
        run.folder.mkdir()
        old = {"updates": 7, "best": best, "train_iterator": {"epoch": 1, "iterations_in_epoch": 3}}
        torch.save(old, run.folder / "checkpoint_last.pt")
        assert run.start() is None
        assert not run.validate(2.0) and run.best() == update
        assert run.validate(2.0) == (update is None)


def test_as_many_of_the_best_are_kept_as_asked_for_whatever_the_losses(tmp_path):
    run = Run(tmp_path, keep_best_checkpoints=2)
    run.start()
    for loss in (3.0, INF, NAN, -1.0, -2.0, 0.5, -3.0):
        run.validate(loss)
    kept = sorted(path.name[: len("checkpoint.best_loss_-2.000")] for path in tmp_path.glob("checkpoint.best*"))
    assert kept == ["checkpoint.best_loss_-2.000", "checkpoint.best_loss_-3.000"] and run.best() == 7


def test_a_run_whose_time_is_over_trains_no_further(tmp_path):
    run = Run(tmp_path)
    run.cfg.optimization.stop_time_hours = 0.5
    assert run.start() == "it has trained for 1.00 hours; --stop-time-hours is 0.5, --reset-meters counts anew"


@pytest.mark.parametrize(("clock", "jump"), [("time", 3e5), ("time", -3e5), ("monotonic", 3e5), ("monotonic", -3e5)])
def test_a_clock_that_jumps_ends_no_run(monkeypatch, clock, jump):
    from fairseq import trainer

    run = SimpleNamespace(_last_time=time.monotonic(), _training_time=60.0)
    right = getattr(time, clock)
    for ahead in (0.0, jump, jump):
        monkeypatch.setattr(time, clock, lambda ahead=ahead: right() + ahead)
        seconds = trainer.Trainer._local_cumulative_training_time(run)
    longest = trainer.LONGEST_STEP if (clock, jump) == ("monotonic", 3e5) else 0
    assert 60 + longest <= seconds < 70 + longest


def test_a_time_that_no_training_takes_counts_as_none(caplog):
    """Such as a jump of the clock left behind, before time was counted by another."""
    from fairseq.trainer import Trainer

    run = SimpleNamespace(_last_time=0.0)
    for number, seconds in enumerate((NAN, INF, -5.0, 10**400, 1.8e9, None, "x"), 1):
        Trainer._take_up_time(run, seconds)
        assert run._training_time == run._previous_training_time == 0 and len(caplog.messages) == number
    Trainer._take_up_time(run, 1800.0)
    assert 1800 <= Trainer._local_cumulative_training_time(run) < 1900 and number == len(caplog.messages)


@pytest.mark.slow
def test_a_rate_that_follows_validations_goes_on_from_an_epochs_end(corpus, tmp_path):
    flags = [str(corpus), *TASK, *SMALL_MODEL, *QUIET, *CARRY, "--decoder-layers", "1", "--optimizer", "adam"]
    flags += "--tokens-per-sample 16 --batch-size 32 --no-epoch-checkpoints --stop-min-lr -1".split()
    flags += "--lr-scheduler reduce_lr_on_plateau --lr-patience 1 --lr-threshold 9".split()
    for folder, epochs in (("whole", "6"), *(("parts", epochs) for epochs in "1236")):
        command("train", *flags, "--max-epoch", epochs, "--save-dir", str(tmp_path / folder))
    assert not differences(trained(tmp_path / "whole"), trained(tmp_path / "parts"))
