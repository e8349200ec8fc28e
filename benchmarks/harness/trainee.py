"""A training in a process of its own, which stops after some updates and goes on when it is told to."""

import contextlib
import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from harness import ROOT
from harness.trainings import FLA, PLAIN, Training


class Finished(Exception):
    """Enough was trained."""


class UpdateBlocks:
    """Updates as they are asked for at the other end of a connection.

    There come a word and a number: "time" so many updates; "profile" one; or "end". An answer says that they are made,
    and one before all of them that everything is loaded. Of each block there is one update more, the first, which is
    not timed: it compiles, and takes memory again that was given back for the others.
    """

    def __init__(self, connection: Connection, device: str) -> None:
        self._connection, self._cuda = connection, device == "cuda"
        self._what, self._ahead, self._left = "", False, 0
        self._words, self._began = 0, 0.0
        self._found: dict[str, Any] = {}

    def update(self, step: Callable[[], Any], words: int) -> Any:
        """Makes an update, which predicts so many words. Raises `Finished` if there is to be no other."""
        if not self._what:
            self._answer()
        if self._ahead:
            self._ahead = False
            result = step()
            self._synchronize()
            self._began = time.perf_counter()
            return result
        result = self._profiled(step) if self._what == "profile" else step()
        self._words += words
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
            # What was compiled and tried in an earlier block does not count.
            torch.cuda.reset_peak_memory_stats()
        else:
            memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._connection.send({"seconds": seconds, "words": self._words, "memory": memory, **self._found})
        self._what, self._left = self._connection.recv()
        self._ahead, self._words, self._found = True, 0, {}
        if self._what == "end":
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
    """Lists the lines that let the CPU wait for the GPU, as torch tells them."""
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
    """How much of the time at least one of these spans covers, from begin to end each."""
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
        # Of several GPUs fairseq-train would take all, and the record speaks of one.
        *"--distributed-world-size 1 --num-workers 0 --optimizer adam --lr 0.00025".split(),
        # One run at a time uses a folder, even if it saves nothing. Losses are read at the end of an epoch.
        *("--save-dir", str(training.data / re.sub(r"\W+", "-", str(training)))),
        *"--disable-validation --no-save --log-interval 1000000 --log-format json --max-update 1000000".split(),
    ]


def train(training: Training, blocks: UpdateBlocks) -> None:
    """Trains until it is told to end."""
    # fairseq takes a package that is there by then, as this one may be, for one whose tasks and models are registered.
    import fairseq_fastweights.models.fast_weight_lm
    import fairseq_fastweights.models.fast_weight_transformer
    import fairseq_fastweights.tasks.fast_weight_language_modeling
    import fairseq_fastweights.tasks.long_runs  # noqa: F401

    with contextlib.suppress(Finished):
        if training.implementation in (PLAIN, FLA):
            from harness import plain_training

            plain_training.train(training, options_of(training), blocks.update)
        else:
            with fairseq_in_blocks(blocks):
                from fairseq_cli import train

                with mock.patch.object(sys, "argv", ["fairseq-train", *options_of(training)]):
                    train.cli_main()


@contextlib.contextmanager
def fairseq_in_blocks(blocks: UpdateBlocks) -> Iterator[None]:
    """Lets a fairseq-train within this process make its updates in blocks."""
    from fairseq.trainer import Trainer

    original = Trainer.train_step

    def train_step(trainer: Any, samples: Any, *arguments: Any, **options: Any) -> Any:
        words = sum(sample["ntokens"] for sample in samples)
        return blocks.update(lambda: original(trainer, samples, *arguments, **options), words)

    with mock.patch.object(Trainer, "train_step", train_step):
        yield


def serve(connection: Connection, training: Training, log: Path) -> None:
    """A process's work: trains, and sends what goes wrong, in words. What is printed goes to the file `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        train(training, UpdateBlocks(connection, training.device))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        told = " ".join(f"{type(error).__name__}: {error}".split())
        # What is not installed was not meant to take part.
        status = "unavailable" if isinstance(error, ModuleNotFoundError) else "failed"
        connection.send({"status": status, "message": told if len(told) <= 200 else f"{told[:197]}..."})
