"""Damaged files are named in one line by fairseq's commands, before the first update."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from fairseq_fastweights import integrity
from fairseq_fastweights.digests import DIGESTS, changed_parts
from tests.conftest import evaluate, train

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
    "goes on": lambda data, path: train(data, path.parent),
    "is told to go on": lambda data, path: train(data, path.parent / "new", "--restore-file", str(path)),
    "finetunes": lambda data, path: train(data, path.parent / "new", "--finetune-from-model", str(path)),
    "transfers": lambda data, path: train(data, path.parent / "new", "--transfer-from", str(path)),
    "evaluates": lambda data, path: evaluate(data, path),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_is_refused_and_what_is_whole_is_named(corpus, run, way):
    path = run / "checkpoint_last.pt"
    flip(path)
    with pytest.raises(ValueError) as error:
        WAYS[way](corpus, path)
    said = str(error.value)
    assert said.startswith(f"checkpoint {path} is damaged: its record ") and "\n" not in said
    assert said.endswith(f"; the newest whole one beside it is checkpoint1.pt: --restore-file {run}/checkpoint1.pt")
    assert not list(run.glob("new/*.pt"))


def test_checkpoints_of_trainings_have_digests_which_the_old_format_is_checked_by(corpus, run):
    path = run / "checkpoint_last.pt"
    flags = "--carry-over-state --store-ema --max-update 43 --save-interval-updates 1 --no-epoch-checkpoints".split()
    log = train(corpus, run, *flags, "--reset-dataloader", "--reset-optimizer", "--reset-lr-scheduler")
    assert "digest" not in log
    assert changed_parts(torch.load(path, weights_only=True)) == []
    before = evaluate(corpus, path, "--tokens-per-sample", "16")
    in_old_format(path)
    assert evaluate(corpus, path, "--tokens-per-sample", "16") == before
    flip(path)
    with pytest.raises(ValueError, match="is damaged: what it holds under model has not the digest"):
        evaluate(corpus, path)
    assert integrity.why_damaged(path)


def test_digests_go_with_what_fairseq_makes_of_a_checkpoint(corpus, run):
    from fairseq import checkpoint_utils

    path = run / "checkpoint_last.pt"
    train(corpus, run / "ema", "--store-ema", "--max-update", "2")
    checkpoint_utils.save_ema_as_checkpoint(str(run / "ema" / "checkpoint_last.pt"), str(path))
    state = torch.load(path, weights_only=True)
    assert changed_parts(state) == []
    # What scripts make of it with torch alone has the digests of before.
    state["model"]["decoder.layers.1.fc1.weight"] /= 2
    torch.save(state, path)
    assert DIGESTS in state and changed_parts(state) == ["model"]
    evaluate(corpus, path, "--tokens-per-sample", "16")


def test_a_pipe_is_not_waited_for(corpus, tmp_path):
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt is a pipe; it must be a regular file"):
        evaluate(corpus, tmp_path / "model.pt")
