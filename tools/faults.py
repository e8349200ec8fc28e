"""Puts faults into trainings that then go on, and compares them, bit for bit, with one that nothing happened to.

    python tools/faults.py [--count 10] [--seed 1] [--folder FOLDER] [FAULT ...]

A tiny model with carried-over states is trained on random words, on CPUs. Each try is a training of its own: the fault
happens at a random time or place, then the same command is given again until it has ended. The table that this prints
says of each fault how often it was tried, how many trainings ended with the same weights, optimizer and place in the
data as the undisturbed one, and how many updates had to be done again at most. The exit status is 1 if any did not.
"""

import argparse
import atexit
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
UPDATES, INTERVAL = 24, 4
MODEL = f"""--user-dir {ROOT}/fairseq_fastweights --task fast_weight_language_modeling --arch fast_weight_lm
    --decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2
    --share-decoder-input-output-embed --no-token-positional-embeddings --carry-over-state --dropout 0.1
    --tokens-per-sample 16 --optimizer adam --lr 0.001 --max-update {UPDATES} --save-interval-updates {INTERVAL}
    --keep-interval-updates 2 --no-epoch-checkpoints --disable-validation --cpu --num-workers 0 --no-progress-bar
    --log-interval 1 --log-format json""".split()
NOBODY = 65534


class Training:
    """The command, in a folder for its checkpoints, in one process or two."""

    def __init__(self, data: Path, folder: Path, processes: int) -> None:
        self.data, self.folder, self.processes = data, folder, processes
        self.save_dir = folder / "checkpoints"
        self.save_dir.mkdir(parents=True)
        self.last = self.save_dir / "checkpoint_last.pt"
        self.starts, self.rank = 0, 0

    def start(self, prepare: Callable[["Training"], None] | None = None) -> list[Any]:
        """Processes that train, once they have done what `prepare` says; forked, so that fairseq is imported once."""
        self.starts += 1
        started = [
            multiprocessing.get_context("fork").Process(target=self._run, args=(rank, prepare))
            for rank in range(self.processes)
        ]
        for process in started:
            process.start()
        return started

    def finish(self) -> list[int | None]:
        """Goes on to the end; the exit codes."""
        started = self.start()
        for process in started:
            process.join(300)
            process.kill()
        return [process.exitcode for process in started]

    def _run(self, rank: int, prepare: Callable[["Training"], None] | None) -> None:
        self.rank = rank
        log = os.open(self.folder / f"{self.starts}-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115 (they may have gone elsewhere)
        atexit._clear()  # the parent's, one of which removes its folder; the plugin runs what there is after a signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
        arguments = [str(self.data), *MODEL, "--save-dir", str(self.save_dir)]
        if self.processes > 1:
            arguments += "--ddp-backend legacy_ddp --distributed-backend gloo --distributed-no-spawn".split()
            arguments += ["--distributed-init-method", f"file://{self.folder}/meeting-{self.starts}"]
            arguments += ["--distributed-world-size", str(self.processes), "--distributed-rank", str(rank)]
        sys.argv = ["fairseq-train", *arguments, "--batch-size", str(4 // self.processes)]
        updates = os.open(self.folder / "updates", os.O_WRONLY | os.O_CREAT)
        if rank == 0:
            self.after_update(lambda number: os.pwrite(updates, str(number).encode(), 0))
        if prepare is not None:
            prepare(self)
        try:
            import_module("fairseq_cli.train").cli_main()
        except KeyboardInterrupt:  # multiprocessing would make 1 of it, and Python makes 130
            os._exit(128 + signal.SIGINT)
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def after_update(self, act: Callable[[int], object]) -> None:
        """Has `act` done, in this process, after each update."""
        trainer = import_module("fairseq.trainer").Trainer
        original = trainer.train_step

        def train_step(self: Any, *arguments: Any, **named: Any) -> Any:
            result = original(self, *arguments, **named)
            act(self.get_num_updates())
            return result

        trainer.train_step = train_step

    def updates_lost(self) -> int:
        """How many updates that were done are not in the last checkpoint."""
        done = self.folder / "updates"
        kept = trained(self.save_dir)["num_updates"] if self.last.exists() else 0
        return max(0, int(done.read_bytes() or 0) - kept) if done.exists() else 0


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Where two checkpoints, or parts of them, are not the same bits."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{name}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [x for i, pair in enumerate(zip(one, other, strict=True)) for x in differences(*pair, f"{name}.{i}")]
    if torch.is_tensor(one) and torch.is_tensor(other):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [name]
    return [] if type(one) is type(other) and one == other else [name]


def trained(save_dir: Path) -> dict[str, Any]:
    """What the last checkpoint says of how training goes on, without times."""
    state = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    extra = state["extra_state"]
    kept = {name: extra[name] for name in ("train_iterator", "ema", "ema_fp32_params") if name in extra}
    # A number whose type fairseq looks at, and whose value it never sets.
    model: dict[str, Any] = {name: x for name, x in state["model"].items() if not name.endswith("_float_tensor")}
    # The history has a row for each time that the run was taken up.
    history: dict[str, Any] = state["optimizer_history"][-1]
    return {"model": model, "optimizer": state["last_optimizer_state"], **kept, **history}


def _signalled(number: signal.Signals, training: Training, draw: random.Random) -> int:
    last, delay = draw.randrange(INTERVAL, UPDATES // 2), draw.uniform(0, 0.05)

    def prepare(training: Training) -> None:
        def after(done: int) -> None:
            if done == last:
                threading.Timer(delay, os.kill, (os.getpid(), number)).start()

        if training.rank == 0:
            training.after_update(after)

    started = training.start(prepare)
    started[0].join(60)
    # What died without a word is noticed by torchrun, which ends the others.
    patience = 60 if started[0].exitcode in (0, 128 + number) else 0.1
    for process in started:
        process.join(patience)
        process.kill()
        process.join()
    lost = training.updates_lost()
    if number != signal.SIGKILL:
        assert {process.exitcode for process in started} == {128 + number}, f"exit code {started[0].exitcode}"
        assert lost == 0, f"{lost} updates are lost"
    return lost


def killed(training: Training, draw: random.Random) -> int:
    """SIGKILL (`kill -9`) at a random time after a random update"""
    return _signalled(signal.SIGKILL, training, draw)


def killed_while_writing(training: Training, draw: random.Random) -> int:
    """SIGKILL while a checkpoint is written, at a random byte"""
    left = draw.randrange(100_000, 700_000)

    def prepare(training: Training) -> None:
        original = torch.save

        def save(state: Any, file: Any) -> None:
            nonlocal left

            class Dying:
                def write(self, data: Any) -> Any:
                    nonlocal left
                    left -= len(data)
                    if left < 0:
                        file.write(data[: len(data) // 2])
                        file.flush()
                        os.kill(os.getpid(), signal.SIGKILL)
                    return file.write(data)

                def flush(self) -> None:
                    file.flush()

            original(state, Dying())  # type: ignore[arg-type]

        torch.save = save  # type: ignore[assignment]

    [process] = training.start(prepare)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, f"exit code {process.exitcode}"
    return training.updates_lost()


def interrupted(training: Training, draw: random.Random) -> int:
    """SIGINT (Ctrl-C) at a random time after a random update"""
    return _signalled(signal.SIGINT, training, draw)


def terminated(training: Training, draw: random.Random) -> int:
    """SIGTERM at a random time after a random update"""
    return _signalled(signal.SIGTERM, training, draw)


def disk_full(training: Training, draw: random.Random) -> int:
    """disk full after a random update, at a random byte of the next checkpoint"""
    number, size = draw.randrange(1, UPDATES), draw.randrange(100, 20_000)

    def prepare(training: Training) -> None:
        def limit(done: int) -> None:
            if done == number:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))

        training.after_update(limit)

    [process] = training.start(prepare)
    process.join(60)
    assert process.exitcode == 1, f"exit code {process.exitcode}"
    return training.updates_lost()


def read_only(training: Training, draw: random.Random) -> int:
    """folder read-only after a random update, and at the next start"""
    number = draw.randrange(1, UPDATES)

    def become_nobody() -> None:
        if os.getuid() == 0:  # who may write everywhere
            os.setuid(NOBODY)

    def forbid(training: Training) -> None:
        def after(done: int) -> None:
            if done == number:
                training.save_dir.chmod(0o555)
                become_nobody()

        training.after_update(after)

    def begin_so(training: Training) -> None:
        checkpoints: Any = import_module("fairseq.checkpoint_utils")
        original = checkpoints.verify_checkpoint_directory

        def verify(save_dir: str) -> None:
            become_nobody()
            original(save_dir)

        checkpoints.verify_checkpoint_directory = verify

    for prepare in (forbid, begin_so):
        [process] = training.start(prepare)
        process.join(60)
        assert process.exitcode == 1, f"exit code {process.exitcode}"
    refused = (training.folder / "2-0.log").read_text()
    assert "which cannot be written to (Permission denied)" in refused, f"it says {refused[-200:]}"
    training.save_dir.chmod(0o755)
    return training.updates_lost()


def bit_flipped(training: Training, draw: random.Random) -> int:
    """a random bit of the last checkpoint flipped, after SIGKILL"""
    lost = killed(training, draw)
    if training.last.exists():
        content = bytearray(training.last.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        training.last.write_bytes(content)
    return lost


class Fault(NamedTuple):
    """What happens, and to a training of how many processes."""

    happen: Callable[[Training, random.Random], int]
    processes: int = 1

    @property
    def title(self) -> str:
        return str(self.happen.__doc__) + (", of two processes" if self.processes == 2 else "")


FAULTS = {
    "kill": Fault(killed),
    "kill-writing": Fault(killed_while_writing),
    "kill-two": Fault(killed, 2),
    "int": Fault(interrupted),
    "term": Fault(terminated),
    "term-two": Fault(terminated, 2),
    "disk-full": Fault(disk_full),
    "read-only": Fault(read_only),
    "bit": Fault(bit_flipped),
}


def write_corpus(folder: Path) -> Path:
    """Random words, binarised."""
    draw, data = random.Random(0), folder / "data"
    text = folder / "text"
    text.write_text("".join(f"{' '.join(f'w{draw.randrange(40)}' for _ in range(9))}\n" for _ in range(200)))
    arguments = ["--only-source", "--trainpref", str(text), "--validpref", str(text), "--destdir", str(data)]

    def run() -> None:
        sys.argv = ["fairseq-preprocess", *arguments]
        import_module("fairseq_cli.preprocess").cli_main()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return data


def main(arguments: list[str] | None = None) -> int:
    """Tries every fault `--count` times, and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Puts faults into trainings, and compares them when they have ended.")
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
    undisturbed: dict[int, dict[str, Any]] = {}
    print("| fault | tried | survived | updates done again, at most |\n| --- | --- | --- | --- |")
    for name in options.faults or FAULTS:
        fault = FAULTS[name]
        if fault.processes not in undisturbed:
            whole = Training(data, folder / f"whole-{fault.processes}", fault.processes)
            assert set(whole.finish()) == {0}, f"the undisturbed training failed; its logs are in {whole.folder}"
            undisturbed[fault.processes] = trained(whole.save_dir)
        wanted = undisturbed[fault.processes]
        survived, most = 0, 0
        for number in range(options.count):
            training = Training(data, folder / f"{name}-{number}", fault.processes)
            try:
                lost = fault.happen(training, random.Random(f"{options.seed} {name} {number}"))
                assert set(training.finish()) == {0}, "it did not go on to the end"
                found = differences(wanted, trained(training.save_dir))
                assert not found, f"other bits in {', '.join(found[:3])}"
                survived, most = survived + 1, max(most, lost)
            except AssertionError as error:
                print(f"{name}, try {number}: {error}", file=sys.stderr)
        print(f"| {fault.title} | {options.count} | {survived} | {most} |", flush=True)
        failed += options.count - survived
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
