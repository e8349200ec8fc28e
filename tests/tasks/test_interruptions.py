"""Signals, folders and files that a long run may meet: it ends with a checkpoint, or does not begin."""

import logging
import os
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from faults import differences, trained

from fairseq_fastweights.tasks import long_runs, save_dir
from fairseq_fastweights.tasks.interruptions import Interruption
from tests.conftest import QUIET, SMALL_MODEL, TASK, command, train
from tests.tasks.conftest import forked, slow
from tests.tasks.test_log_outlets import log_to
from tests.tasks.test_resuming import CARRY

pytestmark = pytest.mark.usefixtures("our_fairseq")
FLAGS = [*CARRY, "--decoder-layers", "1", "--no-epoch-checkpoints"]


def when_update_is_running(number: int, act: Callable[[], object]) -> None:
    """In this process, which is to be a forked one."""
    original = Trainer.train_step

    def train_step(trainer: Trainer, *arguments: object, **named: object) -> object:
        if trainer.get_num_updates() == number - 1:
            act()
        return original(trainer, *arguments, **named)

    Trainer.train_step = train_step


def last_update(folder: Path) -> int:
    return trained(folder)["num_updates"]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six updates without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    train(corpus, folder, *FLAGS, "--max-update", "6")
    return folder


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGTERM, []),  # the others are sent below
        # It is the last update of an epoch, which is saved and validated in any case.
        slow(signal.SIGTERM, ["--batch-size", "48"]),
    ],
)
def test_a_signal_lets_the_update_end_and_the_run_goes_on_from_there(corpus, tmp_path, whole, number, flags):
    def run() -> None:
        when_update_is_running(3, lambda: os.kill(os.getpid(), number))
        train(corpus, tmp_path, *FLAGS, *flags)

    assert forked(run) == 128 + number
    assert last_update(tmp_path) == 3
    before = signal.getsignal(number)
    train(corpus, tmp_path, *FLAGS, "--max-update", "6", *flags)
    assert signal.getsignal(number) == before
    if flags:
        shutil.rmtree(whole := tmp_path / "whole", ignore_errors=True)
        train(corpus, whole, *FLAGS, "--max-update", "6", *flags)
    assert not differences(trained(whole), trained(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGHUP)])
def test_signals_that_data_workers_get_too_let_the_running_update_end(corpus, tmp_path, number):
    def run() -> None:
        os.setpgrp()
        when_update_is_running(3, lambda: os.killpg(0, number))
        train(corpus, tmp_path, "--num-workers", "2")

    assert forked(run) == 128 + number
    assert last_update(tmp_path) == 3


def test_data_workers_end_with_a_run_that_was_not_interrupted(corpus, tmp_path):
    assert forked(lambda: train(corpus, tmp_path, *"--num-workers 2 --max-update 3 --no-save".split())) == 0


@pytest.mark.slow
def test_all_processes_end_when_one_is_interrupted(corpus, tmp_path):
    common = [*TASK, *SMALL_MODEL, *QUIET, *FLAGS, "--optimizer", "adam", "--save-dir", str(tmp_path)]
    common += "--tokens-per-sample 16 --batch-size 4 --ddp-backend legacy_ddp --distributed-backend gloo".split()
    common += ["--distributed-world-size", "2", "--distributed-no-spawn", "--max-update", "9", "--disable-validation"]
    common += ["--distributed-init-method", f"file://{tmp_path}/meeting", "--distributed-rank"]

    def run(rank: int) -> None:
        when_update_is_running(3, lambda: rank and os.kill(os.getpid(), signal.SIGTERM))
        command("train", str(corpus), *common, str(rank))

    codes: list[int | None] = []
    threads = [threading.Thread(target=lambda rank=rank: codes.append(forked(lambda: run(rank)))) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [143, 143] and last_update(tmp_path) == 3


# Other logs that take no more: test_log_outlets.py.
def test_a_log_that_takes_no_more_costs_no_checkpoint(corpus, tmp_path):
    def run() -> None:
        spoil = log_to("hung up")
        stream = open(1, "w", closefd=False)  # noqa: SIM115
        logging.getLogger().addHandler(logging.StreamHandler(stream))  # pytest takes fairseq's away
        progress_bar.SimpleProgressBar.log = stop_writing  # as that of tensorboard does
        when_update_is_running(3, lambda: (spoil(), os.kill(os.getpid(), signal.SIGHUP)))
        flags = [*FLAGS, "--log-format", "simple"]
        train(corpus, tmp_path, *flags)

    def stop_writing(*ignored: object, **named: object) -> None:
        if named["step"] == 3:
            raise OSError(28, "No space left on device")

    assert forked(run) == 128 + signal.SIGHUP
    assert last_update(tmp_path) == 3


def test_a_log_that_nobody_reads_any_more_keeps_no_training_from_its_end(corpus, tmp_path):
    def run() -> None:
        when_update_is_running(3, log_to("nobody"))
        train(corpus, tmp_path, *FLAGS, "--max-update", "6")
        os.write(1, b"text")

    assert forked(run) == 0
    assert last_update(tmp_path) == 6


def test_a_second_ctrl_c_ends_at_once_and_one_that_was_ignored_stays_so(corpus, tmp_path):
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    def run() -> None:
        when_update_is_running(3, interrupt)
        train(corpus, tmp_path, *FLAGS)

    def run_in_background() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):  # by a shell, and by nohup
            signal.signal(number, signal.SIG_IGN)
            when_update_is_running(2, lambda number=number: os.kill(os.getpid(), number))
        run()

    assert forked(run) == 130 and not list(tmp_path.glob("*.pt"))
    assert forked(run_in_background) == 0 and last_update(tmp_path) == 10


def test_a_forked_process_notes_its_own_signals_alone():
    interruption = Interruption()

    def run() -> None:
        interruption.begin()
        inherited = interruption.number
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(100 + interruption.number if not inherited else 1)

    interruption.begin()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert forked(run) == 100 + signal.SIGINT and interruption.number == signal.SIGTERM
    finally:
        interruption.end()


def test_signals_are_handled_as_before_after_a_run(corpus, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(corpus, tmp_path, *FLAGS, "--max-epoch", "1", "--max-update", "0", "--batch-size", "32", "--no-save")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_folder_belongs_to_one_run(corpus, tmp_path, capfd):
    (tmp_path / "checkpoint_1_5.pt.tmp").touch()  # of one that was killed
    train(corpus, tmp_path, *FLAGS, "--max-update", "1")
    assert not list(tmp_path.glob("*.tmp"))
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    # This process has the folder still.
    assert forked(lambda: train(corpus, tmp_path, *FLAGS, "--max-update", "2")) == 1
    said = capfd.readouterr().err
    assert f"save_dir is {tmp_path}, where another training runs (process {os.getpid()} on " in said
    assert "Traceback" not in said and (tmp_path / "checkpoint_last.pt").read_bytes() == before


def test_a_folder_that_cannot_be_written_to_is_told_at_the_start(corpus, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        SystemExit, match=r"save_dir is .*file/x, which cannot be written to \(Not a directory\); it must"
    ):
        train(corpus, tmp_path / "file" / "x", *FLAGS)


LINKS = ("checkpoint_last.pt.tmp", "checkpoint_1_2.pt.tmp", "checkpoint_last.pt.damaged", "checkpoint_last.pt")


def test_a_link_in_the_folder_lets_a_training_write_to_no_file_elsewhere(corpus, tmp_path):
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / save_dir.LOCK).symlink_to(precious)
    with pytest.raises(SystemExit, match=r"run/\.training\.lock is a link; it must be a regular file"):
        save_dir.claim(str(folder))
    (folder / save_dir.LOCK).unlink()
    os.mkfifo(folder / save_dir.LOCK)
    with pytest.raises(SystemExit, match=r"run/\.training\.lock is a pipe; it must be a regular file"):
        save_dir.claim(str(folder))
    (folder / save_dir.LOCK).unlink()
    (folder / save_dir.LOCK).hardlink_to(precious)
    # The training replaces each link by a file of its own; a link to the folder is allowed.
    train(corpus, tmp_path / "link", *FLAGS, *"--max-update 2 --save-interval-updates 2".split())
    for name in LINKS:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(precious)
    train(corpus, tmp_path / "link", *FLAGS, *"--max-update 4 --save-interval-updates 2".split())
    assert precious.read_text() == "precious" and last_update(folder) == 4
    assert (folder / LINKS[2]).readlink() == precious  # the damaged one is kept, though it is a link
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_a_folder_that_vanishes_is_made_again(corpus, tmp_path, whole):
    def run() -> None:
        when_update_is_running(3, lambda: shutil.rmtree(tmp_path))
        train(corpus, tmp_path, *FLAGS, "--max-update", "6")

    assert forked(run) == 0
    assert not differences(trained(whole), trained(tmp_path))


@pytest.mark.parametrize("how", ["bit", "short", "all"])
def test_a_damaged_checkpoint_is_replaced_by_the_newest_that_is_whole(corpus, tmp_path, whole, how):
    train(corpus, tmp_path, *FLAGS, *"--max-update 4 --save-interval-updates 2".split())
    last, newest = tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint_1_4.pt"
    damaged = bytearray(last.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    damaged = damaged[: -1 if how == "bit" else len(damaged) // 3]
    for path in [last, newest] if how == "short" else tmp_path.glob("*.pt") if how == "all" else [last]:
        path.write_bytes(damaged)
    for path, seconds in ((newest, 1), (tmp_path / "checkpoint_1_2.pt", 2)):  # by a wrong clock
        os.utime(path, (seconds, seconds))
    torch.save({"model": {}}, tmp_path / "crash.pt")  # has no place in the data
    if how == "all":
        with pytest.raises(
            SystemExit, match=r"checkpoint_last.pt is cut short or damaged.*, and there is no undamaged"
        ):
            train(corpus, tmp_path, *FLAGS, "--max-update", "6")
        return
    log = train(corpus, tmp_path, *FLAGS, "--max-update", "6")
    assert f"training continues from checkpoint_1_{4 if how == 'bit' else 2}.pt; checkpoint_last.pt.damaged" in log
    assert (tmp_path / "checkpoint_last.pt.damaged").read_bytes() == damaged
    assert not differences(trained(whole), trained(tmp_path))


def test_a_training_on_a_cpu_keeps_the_memory_of_large_tensors(corpus, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(long_runs, "keep_freed_memory", lambda: kept.append(True))
    train(corpus, tmp_path, *FLAGS, "--max-update", "1", "--no-save")
    assert kept


def test_a_fairseq_that_is_not_patched_is_told(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "fairseq.extensions", None)
    runpy.run_path(long_runs.__file__)
    assert "this fairseq is not patched: an interrupted training saves no checkpoint" in caplog.text
