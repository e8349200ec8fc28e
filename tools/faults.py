"""Injects faults into trainings that then go on, and compares them, bit for bit, with an undisturbed one.

    python tools/faults.py [--count 10] [--seed 1] [--folder FOLDER] [FAULT ...]

A tiny model with carried-over states is trained on random words, on CPUs. Each try is a training of its own: the fault
happens at a random time or place, then the same command is given again until it has ended. The table that this prints
says of each fault how often it was tried, how many trainings ended with the same weights, optimizer and place in the
data as the undisturbed one, and how many updates had to be done again at most. The exit status is 1 if any did not.
"""

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fault_training import INTERVAL, LINES, LOGS, ROOT, UPDATES, Training, differences, outcome, trained, write_corpus

NOBODY = 65534
CARRIED = "--task fast_weight_language_modeling --carry-over-state"
APART = "--task language_modeling --sample-break-mode eos --disable-validation"


def signalled(
    training: Training,
    draw: random.Random,
    number: signal.Signals = signal.SIGTERM,
    log: str | None = None,
    begin: Callable[[Training], None] = lambda _: None,
) -> int:
    """Sends a signal at a random time after a random update, when its `log` breaks, too."""
    last, delay = draw.randrange(INTERVAL, UPDATES // 2), draw.uniform(0, 0.05)

    def prepare(training: Training) -> None:
        begin(training)
        spoil = LOGS[log]() if log else int

        def act() -> None:
            spoil()
            if log != "terminal":  # the system sends SIGHUP itself
                os.kill(os.getpid(), number)

        if training.rank == 0:
            training.at_update(last, threading.Timer(delay, act).start)

    started = training.start(prepare)
    started[0].join(300)
    # Rank 0 alone gets the signal. torchrun ends the other processes where one dies without a word, as by SIGKILL.
    patience = 300 if started[0].exitcode in (0, 128 + number) else 0.1
    for process in started:
        process.join(patience)
        process.kill()
        process.join()
    lost = training.updates_lost()
    if number != signal.SIGKILL:
        assert {process.exitcode for process in started} == {128 + number}, f"exit code {started[0].exitcode}"
        assert lost == 0, f"{lost} updates are lost"
    return lost


def killed_while_writing(training: Training, draw: random.Random) -> int:
    # Bytes of all checkpoints together, before the process kills itself.
    left = draw.randrange(100_000, 700_000)

    def prepare(training: Training) -> None:
        original = torch.save

        def save(state: Any, file: Any) -> None:
            write = file.write

            def write_or_die(data: Any) -> Any:
                nonlocal left
                left -= len(data)
                if left < 0:
                    write(data[: len(data) // 2])
                    file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(data)

            # Without the file's other methods, torch writes through Python.
            original(state, SimpleNamespace(write=write_or_die, flush=file.flush))

        torch.save = save  # type: ignore[assignment]

    [process] = training.start(prepare)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL, f"exit code {process.exitcode}"
    return training.updates_lost()


def clock_jumps(training: Training, draw: random.Random) -> int:
    clock, ahead = draw.choice(("time", "monotonic")), draw.uniform(-1, 1) * 10 ** draw.uniform(4, 9)
    number = draw.randrange(1, INTERVAL)

    def begin(training: Training) -> None:
        right = getattr(time, clock)
        training.at_update(number, partial(setattr, time, clock, lambda: right() + ahead))

    return signalled(training, draw, begin=begin)


def other_batches(training: Training, draw: random.Random) -> int:
    lost = signalled(training, draw, begin=Training.note_samples)
    choices = ("--batch-size 6", "--batch-size 1", "--max-tokens 30", "--seed 2", "--update-freq 2", "--num-workers 1")
    flags = " ".join([*training.flags, *draw.sample(choices, 2), "--max-update 0 --max-epoch 1"])
    other = Training(training.data, training.folder / "other", draw.choice((1, 2)), flags)
    shutil.copytree(training.save_dir, other.save_dir, dirs_exist_ok=True)
    assert set(other.run(Training.note_samples)) == {0}, f"it did not go on with {flags}"
    found = sorted(training.samples() + other.samples())
    assert found == list(range(LINES)), f"of {LINES} samples {len(set(found))} were read, in {len(found)} readings"
    return lost


def patient(training: Training, draw: random.Random) -> int:
    lost = signalled(training, draw)
    training.finish()
    return lost  # and then the same command once more changes nothing


def not_a_number(training: Training, draw: random.Random) -> int:
    at = draw.randrange(2 * INTERVAL, UPDATES, INTERVAL)

    def prepare(training: Training) -> None:
        program: Any = import_module("fairseq_cli.train")
        original = program.validate

        def validate(cfg: Any, trainer: Any, *others: Any) -> Any:
            if trainer.get_num_updates() != at:
                return original(cfg, trainer, *others)
            os.kill(os.getpid(), signal.SIGTERM)
            return [float("nan")]

        program.validate = validate

    assert training.run(prepare) == [128 + signal.SIGTERM]
    return training.updates_lost()


def fails_once(training: Training, draw: random.Random) -> int:
    number, size, calls = draw.randrange(1, UPDATES // INTERVAL), draw.randrange(1, 20_000), 0

    def prepare(training: Training) -> None:
        original = torch.save

        def save(state: Any, file: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                file.write(b"PK\3\4" * size)
                raise OSError(28, "No space left on device")
            original(state, file)

        torch.save = save  # type: ignore[assignment]

    assert training.run(prepare) == [0]
    why_damaged = import_module("fairseq.integrity").why_damaged
    damaged = [path.name for path in training.save_dir.glob("*.pt") if why_damaged(path)]
    assert not damaged, f"{damaged} are damaged"
    return training.updates_lost()


def wrong_dates(training: Training, draw: random.Random) -> int:
    lost = bit_flipped(training, draw)
    found = list(training.save_dir.glob("*.pt"))
    for path in found:
        os.utime(path, (draw.randrange(10**9),) * 2)
    damaged = training.last.exists() and import_module("fairseq.integrity").why_damaged(training.last)
    numbers = [trained(path.parent, path.name)["num_updates"] for path in found if path != training.last]
    training.finish()
    if damaged:  # not where the bit lies between the archive's records, where none counts
        *_, taken_up, _ = torch.load(training.last, weights_only=True)["optimizer_history"]
        assert taken_up["num_updates"] == max(numbers), f"it went on from update {taken_up['num_updates']}"
    return lost


def links(training: Training, draw: random.Random) -> int:
    precious, lock = training.folder / "precious", training.save_dir / ".training.lock"
    precious.write_text("precious")
    lock.symlink_to(precious)
    assert training.run() == [1], "it did not refuse a lock that is a link"
    lock.unlink()
    names = [f"checkpoint_1_{number}.pt" for number in range(INTERVAL, UPDATES + 1, INTERVAL)]
    for name in draw.sample([*names, "checkpoint_last.pt"], 4):
        (training.save_dir / f"{name}.tmp").symlink_to(precious)
    lost = bit_flipped(training, draw)
    (training.save_dir / "checkpoint_last.pt.damaged").symlink_to(precious)
    training.finish()
    assert precious.read_text() == "precious", "it has written to the file elsewhere"
    return lost


def data_changed(training: Training, draw: random.Random) -> int:
    path, number = training.data / "train.bin", draw.randrange(1, UPDATES - 1)
    before = path.read_bytes()
    after = draw.choice((before[: draw.randrange(len(before) // 8)], before[::-1]))
    try:
        ended = training.run(lambda training: training.at_update(number, partial(path.write_bytes, after)))
        assert ended == [1], "it did not end"
    finally:
        path.write_bytes(before)
    training.check_log(1, f"FileError: {path} has changed while it was read")
    lost = training.updates_lost()
    assert lost == 0, f"{lost} updates are lost"
    return lost


def disk_full(training: Training, draw: random.Random) -> int:
    # A limit on the size of files acts as a disk that is full; -1 lifts the hard limit.
    number, size = draw.randrange(1, UPDATES), draw.randrange(100, 20_000)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, -1))
    ended = training.run(lambda training: training.at_update(number, limit))
    assert ended == [1], f"exit code {ended[0]}"
    return training.updates_lost()


def read_only(training: Training, draw: random.Random) -> int:
    number = draw.randrange(1, UPDATES)

    def forbid() -> None:
        training.save_dir.chmod(0o555)
        if os.getuid() == 0:  # root may write everywhere
            os.setuid(NOBODY)

    def begin_so(training: Training) -> None:
        checkpoints: Any = import_module("fairseq.checkpoint_utils")
        original = checkpoints.verify_checkpoint_directory

        def verify(save_dir: str) -> None:
            forbid()
            original(save_dir)

        checkpoints.verify_checkpoint_directory = verify

    for prepare in (lambda training: training.at_update(number, forbid), begin_so):
        ended = training.run(prepare)
        assert ended == [1], f"exit code {ended[0]}"
    training.check_log(2, "which cannot be written to (Permission denied)")
    training.save_dir.chmod(0o755)
    return training.updates_lost()


def bit_flipped(training: Training, draw: random.Random) -> int:
    lost = signalled(training, draw, signal.SIGKILL)
    if training.last.exists():
        content = bytearray(training.last.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        training.last.write_bytes(content)
    return lost


class Fault(NamedTuple):
    """A fault: its act, which returns the updates that it lost, the training's number of processes and its options."""

    title: str
    happen: Callable[[Training, random.Random], int]
    processes: int = 1
    flags: str = f"{CARRIED} --disable-validation"


def _signal(number: signal.Signals, log: str | None = None) -> Callable[[Training, random.Random], int]:
    return partial(signalled, number=number, log=log)


AT_RANDOM = "at a random time after a random update"
FAULTS = {
    "kill": Fault(f"SIGKILL (`kill -9`) {AT_RANDOM}", _signal(signal.SIGKILL)),
    "kill-writing": Fault("SIGKILL while a checkpoint is written, at a random byte", killed_while_writing),
    "kill-two": Fault(f"SIGKILL (`kill -9`) {AT_RANDOM}, of two processes", _signal(signal.SIGKILL), 2),
    "int": Fault(f"SIGINT (Ctrl-C) {AT_RANDOM}", _signal(signal.SIGINT)),
    "term": Fault(f"SIGTERM {AT_RANDOM}", signalled),
    "term-two": Fault(f"SIGTERM {AT_RANDOM}, of two processes", signalled, 2),
    "disk-full": Fault("disk full after a random update, at a random byte of the next checkpoint", disk_full),
    "read-only": Fault("folder read-only after a random update, and at the next start", read_only),
    "bit": Fault("a random bit of the last checkpoint flipped, after SIGKILL", bit_flipped),
    "unread": Fault(
        "SIGINT at a random time, when what reads the log ends, too (`tee`, and Ctrl-C)",
        _signal(signal.SIGINT, "reader"),
    ),
    "full-log": Fault(
        "SIGTERM at a random time, when the log is a full pipe that nobody reads", _signal(signal.SIGTERM, "full")
    ),
    "hang-up": Fault("a terminal is closed at a random time (SIGHUP)", _signal(signal.SIGHUP, "terminal")),
    "save-once": Fault("a random save fails once, at a random byte", fails_once),
    "nan": Fault(
        "a random validation's loss is NaN, and SIGTERM after it",
        not_a_number,
        flags=f"{CARRIED} --maximize-best-checkpoint-metric",
    ),
    "patience": Fault(
        "SIGTERM at a random time, of a training that `--patience` ends",
        patient,
        flags=f"{CARRIED} --patience 2 --lr 1e-30 --stop-min-lr -1",
    ),
    "dates": Fault("a random bit of the last checkpoint flipped, when all files have random dates", wrong_dates),
    "links": Fault("links in the folder to a file elsewhere, under names that a training writes", links),
    "data": Fault("data cut short, or written over, after a random update, and put back", data_changed),
    "clock": Fault(
        "SIGTERM at a random time, and the clock jumps after a random update, of a training with `--stop-time-hours`",
        clock_jumps,
        flags=f"{CARRIED} --disable-validation --stop-time-hours 1",
    ),
    "remainder": Fault(
        "SIGTERM at a random time, of a training with `--skip-remainder-batch`, into its second epoch",
        signalled,
        flags=f"{APART} --skip-remainder-batch --update-freq 3",
    ),
    "batches": Fault(
        "SIGTERM at a random time, and other batches then: each sample is read once; then as they were",
        other_batches,
        flags=APART,
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Tries every fault `--count` times, and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Injects faults into trainings, and compares their ends.")
    parser.add_argument("faults", nargs="*", default=[], metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--count", type=int, default=10, help="tries of each fault")
    parser.add_argument("--seed", type=int, default=1, help="for times and places")
    parser.add_argument("--folder", type=Path, help="where the trainings and their logs are kept; default: nowhere")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.faults) - set(FAULTS)):
        parser.error(f"FAULT is {unknown[0]}; it must be one of {', '.join(FAULTS)}")
    if options.folder is not None:
        return try_all(options, options.folder)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        os.chmod(folder, 0o755)
        return try_all(options, Path(folder))


def try_all(options: argparse.Namespace, folder: Path) -> int:
    """The table, row by row; 1 if a training ended otherwise than the undisturbed one, else 0."""
    torch.set_num_threads(1)
    for module in ("fairseq_cli.train", "fairseq_cli.preprocess", "torch._dynamo"):  # once, for all that are forked
        import_module(module)
    import_module("fairseq.utils").import_user_module(argparse.Namespace(user_dir=f"{ROOT}/fairseq_fastweights"))
    folder.mkdir(parents=True, exist_ok=True)
    data, failed = write_corpus(folder), 0
    undisturbed: dict[tuple[int, str], dict[str, Any]] = {}
    print("| fault | tried | survived | updates done again, at most |\n| --- | --- | --- | --- |")
    for name in options.faults or FAULTS:
        fault = FAULTS[name]
        kind = fault.processes, fault.flags
        # Faults with the same options share an undisturbed training.
        if kind not in undisturbed:
            whole = Training(data, folder / f"whole-{len(undisturbed)}", *kind)
            whole.finish()
            undisturbed[kind] = outcome(whole)
        wanted = undisturbed[kind]
        survived, most = 0, 0
        for number in range(options.count):
            training = Training(data, folder / f"{name}-{number}", *kind)
            try:
                lost = fault.happen(training, random.Random(f"{options.seed} {name} {number}"))
                training.finish()
                found = differences(wanted, outcome(training))
                assert not found, f"other bits in {', '.join(found[:3])}"
                survived, most = survived + 1, max(most, lost)
            except AssertionError as error:
                print(f"{name}, try {number}: {error}", file=sys.stderr)
        print(f"| {fault.title} | {options.count} | {survived} | {most} |", flush=True)
        failed += options.count - survived
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
