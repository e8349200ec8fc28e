"""Damage of checkpoints is noticed, wherever it is, before anything of them is used."""

import os
import random
import re
import shutil
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_fastweights.files import digests, integrity
from fairseq_fastweights.files.digests import DIGESTS, crc32, model_digest, with_digests
from fairseq_fastweights.files.integrity import num_updates

STATE = {
    "model": {f"layer{i}": torch.arange(20.0).view(4, 5) / (i + 3) for i in range(3)}
    | {"half": torch.arange(6).bfloat16()},
    "cfg": {"lr": [0.25], "name": "x"},
}


def run_state(number: object = 7, **others: Any) -> dict[str, Any]:
    extra = {"train_iterator": {"epoch": 1}, "metrics": {"bleu": np.float64(3), "counts": np.arange(3)}}
    return {
        "args": Namespace(lr=[0.1]),
        "cfg": {"model": Namespace(device=torch.device("cpu")), "names": {1, 2}},
        "model": OrderedDict(w=torch.ones(5)),
        "optimizer_history": [{"num_updates": 3}, {"num_updates": number}],
        "extra_state": extra,
        **others,
    }


def equal(a: Any, b: Any) -> bool:
    """True if two checkpoints hold the same."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a == b


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """A file of which one bit is another, in place: to write it anew takes much longer."""
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        (value,) = file.read(1)
        for written in (value ^ 1 << bit % 8, value):
            file.seek(bit // 8)
            file.write(bytes([written]))
            if written != value:
                yield


@pytest.fixture
def whole(tmp_path) -> Path:
    path = tmp_path / "checkpoint_last.pt"
    torch.save(STATE, path)
    return path


def test_a_flipped_bit_is_noticed_or_changes_nothing(whole):
    content = whole.read_bytes()
    # In the record's directory, at the end, bits decide which records there are, and whether torch reads them at all.
    directory = content.index(b"PK\x01\x02") * 8
    bits = random.Random(0).sample(range(len(content) * 8), 500) + list(range(directory, len(content) * 8, 3))
    noticed = 0
    for bit in bits:
        with flipped(whole, bit):
            if integrity.why_damaged(whole):
                noticed += 1
            else:
                assert equal(torch.load(whole, weights_only=True), STATE), bit
    assert noticed > len(bits) / 2


@pytest.mark.parametrize(("byte", "bit"), [(8, 0), (8, 5), (8, 6), (9, 5), (38, 4)])
def test_a_record_that_torch_would_not_read_is_noticed(whole, byte, bit):
    """For a record that is marked as encrypted or as a folder, torch returns uninitialised memory."""
    records = [match.start() for match in re.finditer(rb"PK\x01\x02", whole.read_bytes())]
    assert len(records) > len(STATE["model"])
    for begin in records:
        with flipped(whole, (begin + byte) * 8 + bit):
            assert integrity.why_damaged(whole), begin


@pytest.mark.filterwarnings("ignore")  # of torch, about pickles with flipped bits
def test_a_flipped_bit_of_the_old_format_is_noticed_or_changes_nothing(whole):
    torch.save(with_digests(STATE), whole, _use_new_zipfile_serialization=False)
    size = whole.stat().st_size
    noticed = 0
    for bit in random.Random(0).sample(range(size * 8), 1000):
        with flipped(whole, bit), whole.open("rb") as file:
            try:
                state = torch.load(file, weights_only=True)
                integrity.check_loaded(file, whole, state)
                state = state["model"]  # as all that load checkpoints ask
            except Exception:
                noticed += 1
            else:
                assert equal(state, STATE["model"]), bit
    assert noticed > 700


@pytest.mark.filterwarnings("ignore")  # of torch, about pickles with flipped bits
def test_loaded_weights_are_checked_by_their_crcs_without_a_second_read(whole, monkeypatch):
    # Three storages of the same numbers, one of which may be damaged.
    state = {"model": {f"same{i}": torch.ones(50) for i in range(3)} | {"tied": STATE["model"]["layer0"]}}
    torch.save(state, whole)
    for bit in random.Random(0).sample(range(whole.stat().st_size * 8), 1000):
        with flipped(whole, bit), whole.open("rb") as file:
            try:
                loaded = torch.load(file, weights_only=True)
                integrity.check_loaded(file, whole, loaded)
            except Exception:
                continue
            assert equal(loaded, state), bit
    read = []
    for module in (integrity, digests):
        monkeypatch.setattr(module, "crc32", lambda x: read.append(len(x)) or crc32(x))
    with whole.open("rb") as file:
        integrity.check_loaded(file, whole, torch.load(file, weights_only=True))
    numbers = [x.nbytes for x in state["model"].values()]
    assert sorted(x for x in read if x in numbers) == sorted(numbers)  # once, in memory


def test_every_flipped_bit_of_a_weight_is_told_with_its_record(whole):
    content, weights = whole.read_bytes(), STATE["model"]["layer1"].numpy().tobytes()
    begin = content.index(weights) * 8
    for bit in range(begin, begin + len(weights) * 8, 7):
        with flipped(whole, bit):
            assert re.fullmatch(
                r"is damaged: its record data/1 is not what was written \(CRC-32 \w{8}, and noted is \w{8}\)",
                str(integrity.why_damaged(whole)),
            )


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_is_cut_short_is_noticed(tmp_path, zipped):
    path = tmp_path / "checkpoint.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=zipped)
    assert integrity.why_damaged(path) is None
    for size in reversed(range(0, path.stat().st_size, 3)):
        os.truncate(path, size)
        assert integrity.why_damaged(path), size


def test_files_of_other_programs_are_whole(tmp_path):
    path = tmp_path / "x.pt"
    for content in ({"args": Namespace(a=1)}, {"path": Path("x")}):  # the safe loader knows one of these classes
        torch.save(content, path)
        assert integrity.why_damaged(path) is None
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert integrity.why_damaged(path) is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is a folder; it must be a regular file"),
        (os.mkfifo, "is a pipe; it must be a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device; it must be a regular file"),
        (lambda path: path.touch(), "is empty (0 bytes)"),
        (lambda path: path.write_bytes(b"<!DOCTYPE html>"), "is damaged or no checkpoint: it begins with b'<!DO'"),
        (lambda path: path.write_bytes(b"PK\3\4" * 99), "is cut short or damaged: the directory at its end cannot"),
    ],
)
def test_other_files_are_named_and_never_waited_for(tmp_path, make, reason):
    make(tmp_path / "model.pt")
    assert str(integrity.why_damaged(tmp_path / "model.pt")).startswith(reason)


def test_the_newest_whole_checkpoint_is_named(whole):
    folder = whole.parent
    # Files' dates are those of a copy, or of a wrong clock.
    for age, name in enumerate(("checkpoint2.pt", "checkpoint3.pt", "checkpoint1.pt", "notes.txt"), start=1):
        shutil.copy(whole, folder / name)
        os.utime(folder / name, (10**9 - age, 10**9 - age))
    assert [path.name for path in integrity.whole_checkpoints(folder)] == [
        *("checkpoint_last.pt", "checkpoint2.pt", "checkpoint3.pt", "checkpoint1.pt")
    ]
    for date, (name, updates) in enumerate({"new": 30, "newer": 200, "as_new": 30, "old": 4}.items()):
        torch.save(run_state(updates), folder / f"{name}.pt")
        os.utime(folder / f"{name}.pt", (date, date))
    found = [path.stem for path in integrity.whole_checkpoints(folder)]
    assert found[:5] == ["newer", "as_new", "new", "old", "checkpoint_last"]
    for name in ("new", "newer", "as_new", "old"):
        (folder / f"{name}.pt").unlink()
    whole.write_bytes(whole.read_bytes()[:-1])
    (folder / "checkpoint2.pt").write_bytes(b"")
    said = integrity.complain(whole, str(integrity.why_damaged(whole)))
    assert said == (
        f"{whole} is cut short or damaged: the directory at its end cannot be read; the newest whole one "
        f"beside it is checkpoint3.pt: --restore-file {folder}/checkpoint3.pt"
    )
    for name in ("checkpoint1.pt", "checkpoint3.pt"):
        (folder / name).unlink()
    assert integrity.complain(whole, "is damaged") == f"{whole} is damaged; of 1 more in {folder} none is whole"
    (folder / "checkpoint2.pt").unlink()
    assert integrity.complain(whole, "is damaged") == f"{whole} is damaged"


def change(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "model": {**state["model"], "half": torch.zeros(6).bfloat16()}}


def test_weights_that_a_program_changed_are_loaded_with_a_warning(whole, caplog):
    def check() -> None:
        with whole.open("rb") as file:
            state = torch.load(file)
            integrity.check_loaded(file, whole, state)
            assert DIGESTS not in state

    for state in (STATE, with_digests(STATE), change(STATE)):
        torch.save(state, whole)
        check()
        assert not caplog.text
    torch.save(change(with_digests(STATE)), whole)
    check()
    assert f"{whole}: its digest of model is not that of what it holds. A program" in caplog.text
    torch.save(change(with_digests(STATE)), whole, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=f"^{whole} is damaged: what it holds under model has not the"):
        check()
    assert "under model has not the digest" in str(integrity.why_damaged(whole))  # no other is advised to be taken


def test_the_command_tells_whole_checkpoints_and_their_digests(whole, capsys):
    def told(content: Any) -> tuple[int, str]:
        torch.save(content, whole)
        status = integrity.main([str(whole)])
        return status, capsys.readouterr().out

    said, digest = f"{whole} is whole; digest of its model", model_digest(STATE["model"])
    assert told(STATE) == (0, f"{said} (none is noted): {digest}\n")
    assert told(with_digests(STATE)) == (0, f"{said} (as noted): {digest}\n")
    assert f"{said} (another one is noted): " in told(change(with_digests(STATE)))[1]
    assert told([1]) == (0, f"{whole} is whole; it holds list, no model\n")
    assert "is refused: it asks for pathlib.PosixPath, which no checkpoint needs" in told({"path": Path("x")})[1]
    os.truncate(whole, 99)
    assert integrity.main([str(whole), "nowhere"]) == 1
    assert re.fullmatch(".* is cut short .*\nnowhere does not exist\n", capsys.readouterr().out)


# Files that are refused have no number of updates: tests/files/test_bounded_loading.py.
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("content", "number"),
    [
        (run_state(), 7),
        (run_state(0), 0),
        (run_state(10**30), 10**30),
        *[(run_state(wrong), -1) for wrong in (True, "7", None, torch.tensor(7))],
        (run_state(extra_state={}), -1),  # of a crash: without a place in the data
        (run_state(optimizer_history=[]), -1),
        ([1], -1),
    ],
)
def test_the_number_of_updates_is_read_from_both_formats(tmp_path, content, number, zipped):
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    assert num_updates(tmp_path / "file.pt") == number


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.write_text("text"), lambda path: None])
def test_a_file_without_a_checkpoint_has_no_updates(tmp_path, make):
    make(tmp_path / "file.pt")
    assert num_updates(tmp_path / "file.pt") == -1
