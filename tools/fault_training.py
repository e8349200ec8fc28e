"""Small trainings for `faults.py`: they end or are interrupted, go on, and are compared bit by bit; logs that break."""

import atexit
import fcntl
import multiprocessing
import os
import pty
import random
import select
import signal
import sys
import termios
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
UPDATES, INTERVAL, LINES = 24, 4, 200
MODEL = f"""--user-dir {ROOT}/fairseq_fastweights --arch fast_weight_lm
    --decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2
    --share-decoder-input-output-embed --no-token-positional-embeddings --dropout 0.1
    --tokens-per-sample 16 --optimizer adam --lr 0.001 --max-update {UPDATES} --save-interval-updates {INTERVAL}
    --keep-interval-updates 2 --no-epoch-checkpoints --cpu --num-workers 0 --no-progress-bar
    --log-interval 1 --log-format json""".split()


class Training:
    """The command, with `flags`, in a folder for its checkpoints, in one process or two."""

    def __init__(self, data: Path, folder: Path, processes: int, flags: str) -> None:
        self.data, self.folder, self.processes, self.flags = data, folder, processes, flags.split()
        self.save_dir = folder / "checkpoints"
        self.save_dir.mkdir(parents=True)
        self.last = self.save_dir / "checkpoint_last.pt"
        self.starts, self.rank = 0, 0

    def start(self, prepare: Callable[["Training"], None] | None = None) -> list[Any]:
        """Forks processes that call `prepare` and train; the parent has imported fairseq."""
        self.starts += 1
        started = [
            multiprocessing.get_context("fork").Process(target=self._run, args=(rank, prepare))
            for rank in range(self.processes)
        ]
        for process in started:
            process.start()
        return started

    def finish(self) -> None:
        """Goes on to the end."""
        assert set(self.run()) == {0}, f"it did not go on to the end; its logs are in {self.folder}"

    def check_log(self, start: int, text: str) -> None:
        """Checks that the log of this start, counted from 1, has the text."""
        said = (self.folder / f"{start}-0.log").read_text()
        assert text in said, f"it says {said[-200:]}"

    def run(self, prepare: Callable[["Training"], None] | None = None) -> list[int | None]:
        """Starts and waits; the exit codes."""
        started = self.start(prepare)
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
        atexit._clear()  # the parent's functions: one removes the folder, and the plugin runs all after a signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for jobs in the background
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
        # Two processes share the batch of one, so that their updates are comparable.
        batch = ["--batch-size", str(4 // self.processes)]
        arguments = [str(self.data), *MODEL, *batch, *self.flags, "--save-dir", str(self.save_dir)]
        if self.processes > 1:
            arguments += "--ddp-backend legacy_ddp --distributed-backend gloo --distributed-no-spawn".split()
            arguments += ["--distributed-init-method", f"file://{self.folder}/meeting-{self.starts}"]
            arguments += ["--distributed-world-size", str(self.processes), "--distributed-rank", str(rank)]
        sys.argv = ["fairseq-train", *arguments]
        # A file holds the number of the last update: it outlives SIGKILL.
        updates = os.open(self.folder / "updates", os.O_WRONLY | os.O_CREAT)
        if rank == 0:
            self._after_step(lambda trainer, _: os.pwrite(updates, str(trainer.get_num_updates()).encode(), 0))
        if prepare is not None:
            prepare(self)
        try:
            import_module("fairseq_cli.train").cli_main()
        except KeyboardInterrupt:  # multiprocessing would make 1 of it, and Python makes 130
            os._exit(128 + signal.SIGINT)
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def at_update(self, number: int, act: Callable[[], object]) -> None:
        """Calls `act`, in this process, after the update of this number."""
        self._after_step(lambda trainer, samples: act() if trainer.get_num_updates() == number else None)

    def note_samples(self) -> None:
        """Notes which samples this process reads."""
        file = os.open(self.folder / "samples", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def note(trainer: Any, samples: Any) -> None:
            numbers = [number for sample in samples if sample for number in sample["id"].tolist()]
            os.write(file, "".join(f"{number}\n" for number in numbers).encode())

        self._after_step(note)

    def samples(self) -> list[int]:
        """The samples that were noted, sorted."""
        return sorted(map(int, (self.folder / "samples").read_text().split()))

    def _after_step(self, act: Callable[[Any, Any], object]) -> None:
        trainer = import_module("fairseq.trainer").Trainer
        original = trainer.train_step

        def train_step(self: Any, samples: Any, *arguments: Any, **named: Any) -> Any:
            result = original(self, samples, *arguments, **named)
            act(self, samples)
            return result

        trainer.train_step = train_step

    def updates_lost(self) -> int:
        """How many updates that were done are not in the last checkpoint."""
        done = self.folder / "updates"
        kept = trained(self.save_dir)["num_updates"] if self.last.exists() else 0
        return max(0, int(done.read_bytes() or 0) - kept) if done.exists() else 0


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """The places where two checkpoints, or parts of them, are not the same bits."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{name}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [x for i, pair in enumerate(zip(one, other, strict=True)) for x in differences(*pair, f"{name}.{i}")]
    if torch.is_tensor(one) and torch.is_tensor(other):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [name]
    return [] if type(one) is type(other) and one == other else [name]


def trained(save_dir: Path, name: str = "checkpoint_last.pt") -> dict[str, Any]:
    """The parts of a checkpoint, the last one or `name`, that decide how training goes on, without times."""
    state = torch.load(save_dir / name, weights_only=True)
    extra = state["extra_state"]
    names = ("train_iterator", "ema", "ema_fp32_params", "best", "early_stopping")
    kept = {name: extra[name] for name in names if name in extra}
    # A number whose type fairseq looks at, and whose value it never sets.
    model: dict[str, Any] = {name: x for name, x in state["model"].items() if not name.endswith("_float_tensor")}
    # The history has a row for each time that the run was taken up.
    history: dict[str, Any] = state["optimizer_history"][-1]
    return {"model": model, "optimizer": state["last_optimizer_state"], **kept, **history}


def outcome(training: Training) -> dict[str, Any]:
    """The results of a training that has ended: its last checkpoint, and the best one if it has validated."""
    names = [path.name for path in training.save_dir.glob("checkpoint_best.pt")]
    return {name: trained(training.save_dir, name) for name in ("checkpoint_last.pt", *names)}


def write_corpus(folder: Path) -> Path:
    """Random words, binarised."""
    draw, data = random.Random(0), folder / "data"
    text = folder / "text"
    text.write_text("".join(f"{' '.join(f'w{draw.randrange(40)}' for _ in range(9))}\n" for _ in range(LINES)))
    arguments = ["--only-source", "--trainpref", str(text), "--validpref", str(text), "--destdir", str(data)]

    def run() -> None:
        sys.argv = ["fairseq-preprocess", *arguments]
        import_module("fairseq_cli.preprocess").cli_main()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return data


def _put(file: int) -> None:
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115


def _read_until_told(source: int) -> Callable[[], object]:
    """Reads by a thread, which closes the file at its end."""
    told = threading.Event()

    def read() -> None:
        while not told.is_set():
            if select.select([source], [], [], 0.01)[0]:
                os.read(source, 2**16)
        os.close(source)

    threading.Thread(target=read, daemon=True).start()
    return told.set


def _pipe_with_reader() -> Callable[[], object]:
    """A pipe, whose reader ends a moment later."""
    source, sink = os.pipe()
    _put(sink)
    return _read_until_told(source)


def _full_pipe() -> Callable[[], object]:
    """A pipe, which is full from then on."""
    _, sink = os.pipe()
    _put(sink)

    def fill() -> None:
        # The other end of the same pipe, which may wait or not by itself.
        other = os.open("/dev/fd/1", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(other, b"x")

    return fill


def _terminal() -> Callable[[], object]:
    """The terminal of a session of its own, which is closed: the system sends SIGHUP."""
    os.setsid()
    controller, file = pty.openpty()
    fcntl.ioctl(file, termios.TIOCSCTTY, 0)
    _put(file)
    return _read_until_told(controller)


LOGS = {"reader": _pipe_with_reader, "full": _full_pipe, "terminal": _terminal}
"""Each takes the place of stdout and stderr, and returns a function that breaks it."""
