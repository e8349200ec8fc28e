"""Checkpoints of fairseq are whole or not there; also those of old releases are loaded, without running their code."""

import argparse
import io
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_fastweights.files.integrity import why_damaged

pytestmark = pytest.mark.usefixtures("our_fairseq")


class Hostile:
    """Unpickling it writes the file `path`; a hostile checkpoint would do something worse."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def checkpoint(**entries: object) -> dict[str, object]:
    run = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqNAG", "num_updates": 7}
    return {
        "args": None,
        "model": OrderedDict(weight=torch.arange(3.0)),
        "optimizer_history": [{**run, "lr_scheduler_state": {"best": None}}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 7}},
        **entries,
    }


def saved(content: object, zipped: int = True, keep: float = 1.0, old: bytes = b"", new: bytes = b"") -> bytes:
    """As torch.save writes it, or as it did before torch 1.6; a part of that, or with other names in it."""
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    written = file.getvalue()[: int(keep * len(file.getvalue()))]
    assert re.search(old, written)
    return re.sub(old, new, written) if old else written


@pytest.fixture
def load(tmp_path: Path):
    """The function by which fairseq trains on, evaluates and generates."""
    from fairseq import checkpoint_utils

    def load(content: bytes, **options: object):
        (tmp_path / "file.pt").write_bytes(content)
        return checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "file.pt"), **options)

    return load


@pytest.mark.parametrize("zipped", [True, False])
def test_loads_an_old_checkpoint_and_allows_nothing_more_to_others(load, zipped: bool) -> None:
    args = argparse.Namespace(task="language_modeling", arch="transformer_lm", lr=0.25, data=["corpus"])
    before = torch.serialization.get_safe_globals()
    state = load(saved(checkpoint(args=args), zipped), arg_overrides={"data": "elsewhere"})
    assert state["args"].arch == "transformer_lm" and state["args"].lr == [0.25]
    assert state["args"].data == "elsewhere" and state["model"]["weight"].tolist() == [0, 1, 2]
    assert set(torch.serialization.get_safe_globals()) == set(before)


@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
def test_meters_of_fairseq_0_8_and_numpy_numbers_load_and_are_saved(load, core: bytes) -> None:
    from fairseq.logging.meters import AverageMeter

    meter = AverageMeter()
    meter.update(1.5, n=2)
    state = checkpoint(extra_state={"train_iterator": {}, "train_meters": {"loss": meter}})
    content = saved(state, False, old=rb"fairseq\.logging\.meters\n", new=b"fairseq.meters\n")
    assert load(content)["extra_state"]["train_meters"]["loss"].count == 2

    counts, big_endian = np.array([[3, 2], [1, 0]]), np.array([1.5], dtype=">f4")
    state = checkpoint(metrics={"counts": counts, "big": big_endian, "loss": np.float64(2.5)})
    content = saved(state, False, old=rb"numpy\._?core\.multiarray\n", new=core + b".multiarray\n")
    for _ in range(2):
        loaded = load(content)["metrics"]
        assert isinstance(loaded["counts"], np.ndarray) and loaded["counts"].dtype == counts.dtype
        assert loaded["counts"].tolist() == counts.tolist() and loaded["big"].tolist() == [1.5]
        assert loaded["loss"] == 2.5
        content = saved(checkpoint(metrics=loaded))


# tests/test_bounded_loading.py and tests/test_integrity.py have more cases.
@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((lambda path, zipped=z: saved(checkpoint(args=Hostile(path)), zipped), "asks for .*open") for z in (0, 1)),
        (lambda path: pickle.dumps(Hostile(path), protocol=2), ""),
        (lambda _: b"", "empty"),
        *((lambda _, zipped=z: saved(checkpoint(), zipped, keep=0.9), "cut short") for z in (0, 1)),
        *((lambda _, x=x: saved(x), "is not one of fairseq") for x in (torch.zeros(2), {"weight": torch.zeros(2)})),
    ],
)
def test_refuses_and_names_what_is_no_checkpoint_and_runs_nothing_of_it(load, content, says, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    with pytest.raises(ValueError, match=rf"file\.pt.* {says}") as error:
        load(content(witness))
    assert "weights_only" not in str(error.value)  # no advice to run it after all
    assert not witness.exists()


def test_a_moving_average_is_loaded_from_a_file_of_nothing_else(tmp_path: Path) -> None:
    from fairseq.checkpoint_utils import load_ema_from_checkpoint

    (tmp_path / "ema.pt").write_bytes(saved({"extra_state": {"ema": {"weight": torch.arange(3.0)}}}))
    assert load_ema_from_checkpoint(str(tmp_path / "ema.pt"))["model"]["weight"].tolist() == [0, 1, 2]


STATE = {"model": {"w": torch.ones(100)}}


JUNK = b"PK\3\4" + b"x" * 5000
FULL = OSError(28, "No space left on device")
LATER = pytest.mark.parametrize("later", [False, True], ids=["at once", "in the background"])


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["torch", "write", "close"])
@LATER
def test_each_try_begins_with_an_empty_file_and_a_failed_one_has_no_name(tmp_path, monkeypatch, failures, when, later):
    from fairseq import checkpoint_utils, checkpoint_writer
    from fairseq.file_io import PathManager

    path, left, torch_save = tmp_path / "checkpoint_last.pt", failures, torch.save
    path.write_bytes(b"before")

    def fail(now: str, file: Any) -> None:
        nonlocal left
        if left and now == when:
            left -= 1
            if not file.closed:
                file.write(JUNK)
            raise FULL

    class Failing(io.FileIO):
        def write(self, data: Any) -> int:
            if data is not JUNK:
                fail("write", self)
            return super().write(data)

        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                fail("close", self)

    def save_failing(state: Any, file: Any) -> None:
        fail("torch", file)
        torch_save(state, file)

    monkeypatch.setattr(checkpoint_writer, "find_spec", lambda name: True)
    monkeypatch.setattr(checkpoint_writer, "open", Failing, raising=False)
    monkeypatch.setattr(torch, "save", save_failing)
    try:
        checkpoint_utils.torch_persistent_save(STATE, str(path), async_write=later)
        PathManager.async_close()
        assert why_damaged(path) is None and torch.equal(torch.load(path)["model"]["w"], STATE["model"]["w"])
    except (OSError, RuntimeError):  # the latter by torch
        assert failures == 3 and path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@LATER
def test_a_copy_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch, later):
    from fairseq import checkpoint_writer

    def cut_off(source, target, size: int) -> None:
        target.write(source.read(1))
        raise FULL

    monkeypatch.setattr(checkpoint_writer, "find_spec", lambda name: True)
    source, path = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    for content in ("first", "second"):
        source.write_text(content)
        checkpoint_writer.copy(str(source), str(path), later)
        checkpoint_writer.finish()
        assert path.read_text() == content
    monkeypatch.setattr(checkpoint_writer.shutil, "copyfileobj", cut_off)
    with pytest.raises(OSError, match="No space left"):
        checkpoint_writer.copy(str(source), str(path), later)
        checkpoint_writer.finish()
    assert path.read_text() == "second" and len(list(tmp_path.iterdir())) == 2
