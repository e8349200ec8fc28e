"""Checkpoints of fairseq are whole or not there, and it writes to no file elsewhere."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fairseq_fastweights.files.integrity import why_damaged

pytestmark = pytest.mark.usefixtures("our_fairseq")
STATE = {"model": {"w": torch.ones(100)}}


@pytest.fixture(params=["at once", "in the background"])
def save(request, monkeypatch) -> Callable[[Path], None]:
    """Saves `STATE`."""
    from fairseq import checkpoint_utils, checkpoint_writer
    from fairseq.file_io import PathManager

    later = request.param != "at once"
    monkeypatch.setattr(checkpoint_writer, "find_spec", lambda name: later or None)

    def save(path: Path) -> None:
        checkpoint_utils.torch_persistent_save(STATE, str(path), async_write=later)
        PathManager.async_close()

    return save


JUNK = b"PK\3\4" + b"x" * 5000
FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["torch", "write", "close"])
def test_each_try_begins_with_an_empty_file_and_a_failed_one_has_no_name(save, tmp_path, monkeypatch, failures, when):
    from fairseq import checkpoint_writer

    path, left, torch_save = tmp_path / "checkpoint_last.pt", failures, torch.save
    path.write_bytes(b"before")

    def fail(file: Any, now: str) -> None:
        nonlocal left
        if left and now == when:
            left -= 1
            with suppress(ValueError):  # it is closed
                file.write(JUNK)
            raise FULL

    class Failing:
        def __init__(self, name: str, mode: str) -> None:
            self.file = open(name, mode)  # noqa: SIM115

        def __enter__(self) -> Any:
            return self if when == "write" else self.file

        def write(self, data: Any) -> int:
            fail(self.file, "write")
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

        def __exit__(self, *ignored: object) -> None:
            self.file.close()
            fail(self.file, "close")

    def save_failing(state: Any, file: Any) -> None:
        fail(file, "torch")
        torch_save(state, file)

    monkeypatch.setattr(checkpoint_writer, "open", Failing, raising=False)
    monkeypatch.setattr(torch, "save", save_failing)
    try:
        save(path)
        assert why_damaged(path) is None and torch.equal(torch.load(path)["model"]["w"], STATE["model"]["w"])
    except (OSError, RuntimeError):  # the latter by torch
        assert failures == 3 and path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_link_names_is_not_written_to(save, tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "checkpoint_last.pt"
    precious.write_text("precious")
    for name in ("checkpoint_last.pt", "checkpoint_last.pt.tmp"):
        (tmp_path / name).symlink_to(precious)
    save(path)
    assert precious.read_text() == "precious" and not path.is_symlink() and why_damaged(path) is None


@pytest.fixture
def run(tmp_path, monkeypatch) -> SimpleNamespace:
    """A run whose `save`, at the end of an epoch, returns what the best checkpoint and the last one hold."""
    from fairseq import checkpoint_utils
    from fairseq.dataclass.configs import CheckpointConfig

    monkeypatch.setattr(checkpoint_utils.save_checkpoint, "best", 1.0, raising=False)
    config = CheckpointConfig(save_dir=str(tmp_path), no_epoch_checkpoints=True)
    epochs = SimpleNamespace(epoch=1, end_of_epoch=lambda: True, state_dict=dict)
    trainer = Mock(data_parallel_rank=0, checkpoint_suffix="", should_save_checkpoint_on_current_rank=True)
    trainer.get_num_updates.return_value = 7

    def save(content: str) -> list[str]:
        trainer.save_checkpoint = lambda path, state: Path(path).write_text(content)
        with suppress(KeyboardInterrupt):
            checkpoint_utils.save_checkpoint(config, trainer, epochs, 1.0)
        return [path.read_text() for path in sorted(tmp_path.glob("*.pt"))]

    return SimpleNamespace(save=save, config=config)


def test_a_copy_that_is_cut_off_leaves_the_last_checkpoint_whole(run, tmp_path, monkeypatch):
    from fairseq import checkpoint_writer

    def cut_off(source, target, size: int) -> None:
        target.write(source.read(1))
        raise KeyboardInterrupt

    assert run.save("first") == ["first", "first"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.shutil, "copyfileobj", cut_off)
        assert run.save("second") == ["second", "first"]
    assert run.save("third") == ["third", "third"] and len(list(tmp_path.iterdir())) == 2


def test_background_writes_are_of_copies_and_their_failures_are_raised(run, tmp_path, monkeypatch):
    from fairseq import checkpoint_writer
    from fairseq.file_io import PathManager

    monkeypatch.setattr(checkpoint_writer, "find_spec", lambda name: True)
    run.config.write_checkpoints_asynchronously = True
    run.save("first")
    PathManager.async_close()
    assert (tmp_path / "checkpoint_last.pt").read_text() == "first"
    checkpoint_writer.copy(str(tmp_path / "none.pt"), str(tmp_path / "checkpoint_last.pt"), True)
    with pytest.raises(FileNotFoundError):
        PathManager.async_close()
    assert (tmp_path / "checkpoint_last.pt").read_text() == "first"
