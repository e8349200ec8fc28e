"""A training whose data changes ends in one line, keeps its last update, and goes on with the data that it had."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.trainer import Trainer
from faults import differences, trained

from fairseq_fastweights import command_line
from fairseq_fastweights.tasks import long_runs
from tests.conftest import age, binarise, evaluate, train
from tests.tasks.conftest import slow, train_in_two

pytestmark = pytest.mark.usefixtures("our_fairseq")

CARRY = ["--no-token-positional-embeddings", "--carry-over-state"]
SMALL = ["--decoder-layers", "1", "--no-epoch-checkpoints"]


@pytest.fixture
def data(corpus, tmp_path) -> Path:
    """A copy that may be spoilt, and a copy of it that is whole."""
    shutil.copytree(corpus, tmp_path / "whole")
    return shutil.copytree(corpus, tmp_path / "data")


def cut(path: Path) -> None:
    os.truncate(path, 10)


def replace(path: Path) -> None:
    """Puts other data of the same size in its place, as fairseq-preprocess does."""
    content = path.read_bytes()
    path.with_suffix(".new").write_bytes(content[-2:] + content[:-2])
    path.with_suffix(".new").replace(path)


@pytest.fixture
def change(monkeypatch) -> Callable[[int, Callable[[], object]], None]:
    """Lets something happen after a number of updates."""

    def arrange(updates: int, happens: Callable[[], object]) -> None:
        original = Trainer.train_step

        def step(trainer: Trainer, *arguments: object, **named: object) -> object:
            result = original(trainer, *arguments, **named)
            if trainer.get_num_updates() == updates and trainer.data_parallel_rank == 0:
                happens()
            return result

        monkeypatch.setattr(Trainer, "train_step", step)

    return arrange


def updates(folder: Path) -> int:
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    return state["optimizer_history"][-1]["num_updates"]


WAYS = {
    "carried": CARRY,
    "parts of an update": "--update-freq 2 --data-buffer-size 0".split(),
    "workers": "--num-workers 1 --data-buffer-size 1".split(),
}


@pytest.mark.parametrize("way", [slow(way) if way == "workers" else way for way in WAYS])
def test_the_last_update_is_kept_and_the_run_goes_on_as_before(data, tmp_path, change, way):
    flags = [*SMALL, *WAYS[way], "--max-update", "6"]
    train(data, tmp_path / "undisturbed", *flags)
    change(3, lambda: cut(data / "train.bin"))
    with pytest.raises(ValueError, match=rf"^{data}/train\.bin has changed while it was read: it had ") as error:
        train(data, tmp_path / "run", *flags)
    assert command_line.told(error.value) == str(error.value) and "\n" not in str(error.value)
    assert updates(tmp_path / "run") in (3, 4)
    shutil.copy(tmp_path / "whole" / "train.bin", data)
    train(data, tmp_path / "run", *flags)
    found = differences(trained(tmp_path / "undisturbed"), trained(tmp_path / "run"))
    assert not found, found


def test_the_last_updates_place_is_kept_when_the_next_is_read_in_part(data, monkeypatch):
    """Data that is open elsewhere in the process does not matter."""
    saved: list[int] = []
    monkeypatch.setattr(
        checkpoint_utils, "save_checkpoint", lambda cfg, trainer, epochs, _: saved.append(epochs._cur_epoch_itr.n)
    )
    other = data_utils.load_indexed_dataset(str(data / "test"))
    cut(data / "test.bin")
    epochs = SimpleNamespace(_cur_epoch_itr=None, _next_epoch_itr=SimpleNamespace(n=2), iterations_in_epoch=4)
    last = long_runs.LastUpdate(epochs)
    last.keep(SimpleNamespace(checkpoint=None), None, epochs)  # nothing has been read
    for updates in (0, 1):
        epochs._cur_epoch_itr = SimpleNamespace(n=5)
        assert updates == 0 or last.note(epochs) == 0
        last.keep(SimpleNamespace(checkpoint=None), None, epochs)
    assert saved == [2, 4] and len(other) > 0


def test_both_of_two_processes_end_and_the_last_update_is_kept(data, tmp_path, change, capfd):
    change(2, lambda: cut(data / "valid.bin"))
    with pytest.raises(AssertionError, match=r"assert \[1, 1\] == "):
        train_in_two(data, tmp_path, *SMALL, *CARRY, "--max-update", "6")
    assert "FileError: " + str(data / "valid.bin") + " has changed while it was read" in capfd.readouterr().err
    assert updates(tmp_path) in (2, 3)


def test_a_run_is_not_taken_up_with_other_data_unless_an_epoch_begins(data, tmp_path, change):
    flags = [*SMALL, "--max-update"]
    change(2, lambda: replace(data / "train.bin"))
    train(data, tmp_path / "run", *flags, "4")  # it goes on with the data that it opened
    assert updates(tmp_path / "run") == 4
    with pytest.raises(
        ValueError, match=r"train\.bin is not what the checkpoint stopped in .*--reset-dataloader"
    ) as told:
        train(data, tmp_path / "run", *flags, "6")
    assert command_line.told(told.value) == str(told.value) and updates(tmp_path / "run") == 4
    train(data, tmp_path / "run", *flags, "6", "--reset-dataloader")
    assert updates(tmp_path / "run") == 6


def test_a_part_of_the_data_that_changes_before_it_is_read_again_is_named(tmp_path, change):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for split in ("train", "valid"):
            (tmp_path / name / f"{split}.txt").write_text("a b c d e f g\n" * 9)
    parts = [binarise(tmp_path / name) for name in ("one", "two")]
    age(tmp_path)
    change(2, lambda: replace(parts[0] / "train.bin"))
    flags = [*SMALL, *"--batch-size 100 --max-epoch 4 --max-update 99".split()]
    with pytest.raises(ValueError, match=r"one.*train\.bin has changed since this training read it: its .* are others"):
        train(Path(":".join(map(str, parts))), tmp_path / "run", *flags)
    assert updates(tmp_path / "run") == 2


def test_an_evaluation_names_data_that_changes(data, tmp_path, model, monkeypatch):
    from fairseq.sequence_scorer import SequenceScorer

    original = SequenceScorer.generate
    path = model()

    def score(*arguments: object, **named: object) -> object:
        cut(data / "test.bin")
        return original(*arguments, **named)

    monkeypatch.setattr(SequenceScorer, "generate", score)
    with pytest.raises(ValueError, match=r"test\.bin has changed while it was read: ") as error:
        evaluate(data, path, *"--tokens-per-sample 16 --batch-size 1".split())
    assert command_line.told(error.value) == str(error.value)
