"""Checkpoints of fairseq are whole or not there, and it writes to no file elsewhere."""

import io
from typing import Any

import pytest
import torch

from fairseq_fastweights.files.integrity import why_damaged

pytestmark = pytest.mark.usefixtures("our_fairseq")
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
