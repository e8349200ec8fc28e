"""Damaged files are named in one line by fairseq's commands, before the first update."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_fastweights.files import integrity
from fairseq_fastweights.files.digests import DIGESTS, is_changed
from tests.conftest import evaluate, train
from tests.tasks.conftest import train_translation

pytestmark = pytest.mark.usefixtures("our_fairseq")


def flip(path: Path) -> None:
    """Changes one bit of a weight."""
    state = torch.load(path, weights_only=True)["model"]
    content = bytearray(path.read_bytes())
    content[content.index(state["decoder.layers.1.fc1.weight"].numpy().tobytes()) + 7] ^= 4
    path.write_bytes(content)


def in_old_format(path: Path) -> None:
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)


@pytest.fixture
def run(corpus, model, tmp_path) -> Path:
    """A folder with two checkpoints; the second is the one that training goes on from."""
    shutil.copy(corpus / "dict.txt", tmp_path)
    for seconds, name in ((1, "checkpoint1.pt"), (2, "checkpoint_last.pt")):
        shutil.copy(model(), tmp_path / name)
        os.utime(tmp_path / name, (seconds, seconds))
    return tmp_path


WAYS = {
    "is told to go on": lambda data, path: train(data, path.parent / "new", "--restore-file", str(path)),
    "finetunes": lambda data, path: train(data, path.parent / "new", "--finetune-from-model", str(path)),
    "transfers": lambda data, path: train(data, path.parent / "new", "--transfer-from", str(path)),
    "evaluates": lambda data, path: evaluate(data, path),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_is_refused_and_a_whole_checkpoint_is_named(corpus, run, way):
    path = run / "checkpoint_last.pt"
    flip(path)
    with pytest.raises(ValueError) as error:
        WAYS[way](corpus, path)
    said = str(error.value)
    assert said.startswith(f"{path} is damaged: its record ") and "\n" not in said
    assert said.endswith(f"; the newest whole one beside it is checkpoint1.pt: --restore-file {run}/checkpoint1.pt")
    assert not list(run.glob("new/*.pt"))


def test_checkpoints_have_digests_by_which_the_old_format_is_checked(corpus, tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    for updates in ("2", "3"):
        flags = "--carry-over-state --store-ema --no-epoch-checkpoints --max-update".split()
        assert "its digest of" not in train(corpus, tmp_path, *flags, updates)
    assert is_changed(torch.load(path, weights_only=True)) is False
    before = evaluate(corpus, path, "--tokens-per-sample", "16")
    in_old_format(path)
    assert evaluate(corpus, path, "--tokens-per-sample", "16") == before
    flip(path)
    with pytest.raises(ValueError, match="is damaged: what it holds under model has not the digest"):
        evaluate(corpus, path)
    assert integrity.why_damaged(path)


def test_checkpoints_of_averaged_weights_have_their_own_digest(corpus, run):
    from fairseq import checkpoint_utils

    path = run / "checkpoint_last.pt"
    # Resumed trainings with a moving average: tests/tasks/test_resuming.py.
    train(corpus, run / "ema", *"--store-ema --ema-decay 0.5 --max-update 2".split())
    checkpoint_utils.save_ema_as_checkpoint(str(run / "ema" / "checkpoint_last.pt"), str(path))
    last, state = (torch.load(x, weights_only=True) for x in (run / "ema" / "checkpoint_last.pt", path))
    assert is_changed(state) is False
    settings, weight = "decoder.settings_version", "decoder.layers.0.fc1.weight"
    assert state["model"][settings].dtype == torch.int64  # it is not averaged
    assert torch.equal(state["model"][settings], last["model"][settings])
    assert not torch.equal(state["model"][weight], last["model"][weight])
    train(corpus, run / "other", *"--store-ema --ema-decay 0.9 --max-update 2".split())
    other = torch.load(run / "other" / "checkpoint_last.pt", weights_only=True)
    assert torch.equal(other["model"][weight], last["model"][weight])
    assert not torch.equal(other["extra_state"]["ema"][weight], last["extra_state"]["ema"][weight])
    # A script that changes weights with torch alone keeps the former digest.
    state["model"]["decoder.layers.1.fc1.weight"] /= 2
    torch.save(state, path)
    assert DIGESTS in state and is_changed(state)
    evaluate(corpus, path, "--tokens-per-sample", "16")


def test_a_pipe_is_not_waited_for(corpus, tmp_path):
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt is a pipe; it must be a regular file"):
        evaluate(corpus, tmp_path / "model.pt")


DATA = {
    "idx": (lambda path: os.truncate(path, path.stat().st_size - 5), "bytes; with the .* entries that it says it must"),
    "bin": (lambda path: os.truncate(path, path.stat().st_size - 5), "bytes; by .*idx it must have"),
    "dict": (lambda path: path.write_text("".join(path.read_text().splitlines(True)[:9])), "the token number "),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("task", ["language", "translation"])
def test_damaged_data_is_named_before_the_first_update(request, tmp_path, task, kind):
    of_language = task == "language"
    data = shutil.copytree(request.getfixturevalue("corpus" if of_language else "pairs"), tmp_path / "data")
    name = "train" if of_language else "train.en-de.de"
    spoil, message = DATA[kind]
    spoil(data / ("dict.txt" if of_language else "dict.de.txt") if kind == "dict" else data / f"{name}.{kind}")
    with pytest.raises(ValueError, match=message) as error:
        (train if of_language else train_translation)(data, tmp_path / "run")
    said = str(error.value)
    assert said.startswith(str(data)) and "\n" not in said
    assert not list(tmp_path.glob("run/*.pt"))
