"""Trainings in worker processes, which get ready side by side and then take turns on the device.

A worker answers after each block of updates, and waits to be asked for the next one.
"""

import contextlib
import math
import multiprocessing
import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness import ROOT
from harness.pages import brief
from harness.timing import Budget, summarize
from harness.trainings import FLA, PLAIN, Training

Row = dict[str, Any]

TURN_SECONDS = {"cuda": 1.0, "cpu": 3.0}
MOST_UPDATES = 40  # of a turn
WARM_UP = 5  # updates before the first turn
FEWEST_PROCESSES = 8  # that wait side by side, where there are fewer cores
# Shares of a GPU's memory: for workers that wait, each with a sixth of its memory for weights and averages, a guess;
# and for workers that compile and make their first updates.
WAITING, WARMING = 0.4 * 6, 0.5
# In seconds: for an answer that takes a few; for a process to end; of the budget, for another group to begin; until a
# worker that is not ready is left out.
PATIENCE, SECONDS_TO_END = 120.0, 10.0
LEAST = {"cuda": 60.0, "cpu": 0.0}
LONGEST_SET_UP = {"cuda": 150.0, "cpu": 600.0}


class Finished(Exception):
    """The last update that was asked for is made."""


class UpdateBlocks:
    """The worker's side of the connection: makes updates in blocks.

    A request is a word and a number: ("time", n) for n updates, ("profile", 1) or ("end", 0). The first answer, before
    any update, says that the training is loaded. The first update of a block is an extra one that is not timed: it
    compiles, and allocates memory again that was released for the other workers.
    """

    def __init__(self, connection: Connection, device: str) -> None:
        self._connection, self._cuda = connection, device == "cuda"
        self._asked, self._ahead, self._left = "", False, 0
        self._tokens, self._began = 0, 0.0
        self._found: dict[str, Any] = {}

    def update(self, step: Callable[[], Any], tokens: int) -> Any:
        """Makes an update, which predicts so many tokens. Raises `Finished` when no other is wanted."""
        if not self._asked:
            self._answer()
        if self._ahead:
            self._ahead = False
            result = step()
            self._synchronize()
            self._began = time.perf_counter()
            return result
        result = self._profiled(step) if self._asked == "profile" else step()
        self._tokens += tokens
        self._left -= 1
        if not self._left:
            self._answer()
        return result

    def _answer(self) -> None:
        self._synchronize()
        seconds = time.perf_counter() - self._began
        if self._cuda:
            memory = torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            # The memory of compiling and autotuning in an earlier block does not count.
            torch.cuda.reset_peak_memory_stats()
        else:
            memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._connection.send({"seconds": seconds, "tokens": self._tokens, "memory": memory, **self._found})
        self._asked, self._left = self._connection.recv()
        self._ahead, self._tokens, self._found = True, 0, {}
        if self._asked == "end":
            raise Finished

    def _profiled(self, step: Callable[[], Any]) -> Any:
        from harness.updates import PARTS, count

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        waits: list[str] = []
        with profile(activities=activities) as found:
            with waits_listed(waits) if self._cuda else contextlib.nullcontext():
                result = step()
            self._synchronize()
        on_cpu = [event for event in found.events() if event.device_type == DeviceType.CPU]
        self._found["operators"] = sum(sum(counter.values()) for counter in count(on_cpu).values())
        if self._cuda:
            # The profiler repeats the names of an update's parts on the GPU's time line: they are no kernels.
            spans = [
                (event.start_ns(), event.end_ns())
                for event in found.profiler.kineto_results.events()
                if event.device_type() == DeviceType.CUDA
                and event.name() not in PARTS
                and not event.is_user_annotation()
            ]
            self._found |= {"kernels": len(spans), "kernel seconds": covered(spans) / 1e9, "waits": waits}
        return result

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


@contextlib.contextmanager
def waits_listed(found: list[str]) -> Iterator[None]:
    """Lists the lines at which the CPU waits for the GPU, by torch's `set_sync_debug_mode`."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [each for each in told if "synchronizing CUDA operation" in str(each.message)]
    found += [f"{each.filename.rpartition('site-packages/')[2]}:{each.lineno}" for each in lines]


def covered(spans: list[tuple[int, int]]) -> int:
    """Time that at least one of these spans, (begin, end), covers."""
    total = end = 0
    for begin, until in sorted(spans):
        total += max(0, until - max(begin, end))
        end = max(end, until)
    return total


def options_of(training: Training) -> list[str]:
    """The arguments of `fairseq-train` on the command line."""
    return [
        *(str(training.data), *training.flags, "--user-dir", str(ROOT / "fairseq_fastweights")),
        *(["--cpu"] if training.device == "cpu" else []),
        *([] if training.precision == "fp32" else [f"--{training.precision}"]),
        # fairseq-train would use all GPUs, and the record speaks of one.
        *"--distributed-world-size 1 --num-workers 0 --optimizer adam --lr 0.00025".split(),
        # One run at a time may use a folder, even if it saves nothing. Losses are read at the end of an epoch.
        *("--save-dir", str(training.data / re.sub(r"\W+", "-", str(training)))),
        *"--disable-validation --no-save --log-interval 1000000 --log-format json --max-update 1000000".split(),
    ]


def train(training: Training, blocks: UpdateBlocks) -> None:
    """Trains in blocks of updates until the other side ends it."""
    # A package that is imported already counts for fairseq as one whose tasks and models are registered.
    import fairseq_fastweights.models.fast_weight_lm
    import fairseq_fastweights.models.fast_weight_transformer
    import fairseq_fastweights.tasks.fast_weight_language_modeling
    import fairseq_fastweights.tasks.long_runs  # noqa: F401

    with contextlib.suppress(Finished):
        if training.implementation in (PLAIN, FLA):
            from harness import plain_training

            plain_training.train(training, options_of(training), blocks.update)
            return
        from fairseq.trainer import Trainer
        from fairseq_cli import train

        original = Trainer.train_step

        def train_step(trainer: Any, samples: Any, *arguments: Any, **options: Any) -> Any:
            tokens = sum(sample["ntokens"] for sample in samples)
            return blocks.update(lambda: original(trainer, samples, *arguments, **options), tokens)

        command = mock.patch.object(sys, "argv", ["fairseq-train", *options_of(training)])
        with mock.patch.object(Trainer, "train_step", train_step), command:
            train.cli_main()


def serve(connection: Connection, training: Training, log: Path) -> None:
    """A worker process: trains, and sends the error of a training that fails. Its output goes to the file `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        train(training, UpdateBlocks(connection, training.device))
    except BaseException as error:
        traceback.print_exc()
        # A peer that is not installed is no failure.
        status = "unavailable" if isinstance(error, ModuleNotFoundError) else "failed"
        connection.send({"status": status, "message": brief(error)})


class Worker:
    """A worker process, seen from the program that measures; `row` is its result, or why it has none."""

    def __init__(self, training: Training, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.training, self.row, self._log = training, Row(), log
        self._turns: list[Row] = []
        self._seconds = 1e-6
        self._process = context.Process(target=serve, args=(theirs, training, log), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, seconds: float, late: str = "failed") -> Row:
        """The answer that comes within so many seconds; empty if there is none: then the worker is lost, or `late`."""
        try:
            if self.connection.poll(seconds):
                found = self.connection.recv()
            else:
                found = {"status": late, "message": f"it did not answer within {seconds:.0f} s"}
        except (EOFError, OSError):
            lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            found = {"status": "failed", "message": f"its process ended: {last[:150]}"}
        if "status" not in found:
            return found
        self.row = found
        self.end()
        return {}

    def tell(self, request: str, updates: int) -> None:
        """Sends a request."""
        with contextlib.suppress(OSError):  # the process has ended; `answer` says why
            self.connection.send((request, updates))

    def end(self) -> None:
        """Ends the process, by force if it does not end by itself."""
        self.tell("end", 0)
        self._process.join(SECONDS_TO_END)
        self._process.kill()
        self._process.join()

    def warm_up(self, seconds: float) -> None:
        """Waits for the first updates, which were asked for."""
        if found := self.answer(seconds, "left out"):
            self._seconds = found["seconds"] / WARM_UP

    def take_turn(self) -> None:
        """Times updates for about as long as a turn is."""
        updates = max(2, min(MOST_UPDATES, math.ceil(TURN_SECONDS[self.training.device] / max(self._seconds, 1e-6))))
        self.tell("time", updates)
        if turn := self.answer(PATIENCE):
            self._turns.append(turn | {"updates": updates})
            self._seconds = turn["seconds"] / updates

    def finish(self) -> None:
        """Profiles an update, makes the row of speed, memory, operators and waits, and ends the process."""
        self.tell("profile", 1)
        if not (profiled := self.answer(PATIENCE)):
            return
        speeds = summarize([turn["tokens"] / turn["seconds"] for turn in self._turns])
        seconds = summarize([turn["seconds"] / turn["updates"] for turn in self._turns])
        on_gpu = profiled.get("kernels")
        # A profiler slows down the CPU: the GPU's time is compared with an update that was not profiled.
        busy = min(1.0, profiled["kernel seconds"] / seconds["median"]) if on_gpu else None
        self.row = {"status": "measured", "tokens per second": speeds, "seconds": seconds}
        self.row |= {"peak bytes": max(turn["memory"] for turn in self._turns), "operators": profiled["operators"]}
        self.row |= {"kernels": on_gpu or None, "busy": busy, "waits": profiled.get("waits")}
        self.end()


Guessed = tuple[Training, int]
"""A training, with a guess of the GiB that it takes at work."""


def slices(trainings: Sequence[Guessed], room: float, most: int) -> Iterator[list[Guessed]]:
    """Divides trainings, in order, into groups of at most `most` that fit into `room` GiB, or that are one."""
    group: list[Guessed] = []
    for training, memory in trainings:
        if group and (len(group) == most or memory + sum(each for _, each in group) > room):
            yield group
            group = []
        group.append((training, memory))
    if group:
        yield group


def measure(
    trainings: Sequence[Guessed],
    folder: Path,
    device: str,
    rounds: int,
    budget: Budget,
    save: Callable[[list[Row]], Any],
    memory: float,
) -> None:
    """Measures all trainings, one group after the other, and saves the rows after each.

    A group starts side by side, as many as fit compile and make their first updates at a time, and then all take turns,
    A B C A B C ...: one round in any case, others while there are seconds left. `memory`: GiB of the GPU; infinite on a
    CPU, whose cores serve one at a time.
    """
    workers: list[Worker] = []
    cores = os.cpu_count() or 1
    # Several compile at the same time.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // 4)))
    for number, group in enumerate(slices(trainings, WAITING * memory, max(FEWEST_PROCESSES, cores))):
        if number and budget.left <= LEAST[device]:
            budget.cut += [f"{training}: not measured" for training, _ in group]
            continue
        started = {training: Worker(training, folder / f"{number}-{i}.log") for i, (training, _) in enumerate(group)}
        workers += started.values()
        until = time.monotonic() + min(LONGEST_SET_UP[device], max(budget.left, 0))
        for few in slices(group, WARMING * memory if device == "cuda" else 0.0, len(group)):
            warming = [started[training] for training, _ in few]
            loaded = [worker for worker in warming if worker.answer(max(0.0, until - time.monotonic()), "left out")]
            for worker in loaded:
                worker.tell("time", WARM_UP)
            for worker in loaded:
                worker.warm_up(max(0.0, until - time.monotonic()))
        made = 0
        # A worker that has a row already is lost, with the reason in it.
        while (ready := [worker for worker in started.values() if not worker.row]) and made < rounds:
            if made and budget.left <= 0:
                break
            for worker in ready:
                worker.take_turn()
            made += 1
        for worker in ready:
            worker.finish()
        if made < rounds:
            budget.cut += [f"{worker.training}: {made} rounds of {rounds}" for worker in ready]
        for training, worker in started.items():
            row = worker.row
            told = f"{row['tokens per second']['median']:,.0f} tokens/s" if "seconds" in row else row["message"]
            print(f"{training}: {told}", file=sys.stderr, flush=True)
        facts = ("part", "model", "implementation")
        save([{fact: getattr(worker.training, fact) for fact in facts} | worker.row for worker in workers])
