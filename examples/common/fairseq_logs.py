"""Reads the logs that `fairseq-train` writes."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

_GPU = re.compile(r"rank +(\d+): capabilities = .*? total memory = ([\d.]+) GB ; name = (.*?) *$", re.MULTILINE)
_BACKEND = re.compile(r"\| (\w+) \| [\w.]+ \| fast weight rules run by ([^;\n]+)")
_JSON_LINE = re.compile(r"\| (train_inner|train|valid) \| (\{.*)$", re.MULTILINE)


@dataclass
class Training:
    """The contents of a log of `fairseq-train --log-format json`."""

    parameters: int | None = None  # of the model; None if the log ends before that was built
    train: dict[int, float] = field(default_factory=dict)  # perplexity by update, each update once
    valid: dict[int, float] = field(default_factory=dict)
    # Medians of the reports, or of the epochs of a training that is shorter than the time to its first report.
    speed: float | None = None  # tokens per second
    updates_per_second: float | None = None
    seconds: float = 0.0  # that its updates took, all parts of an interrupted training together
    finished: bool = False
    gpus: list[str] = field(default_factory=list)  # the name of each, of the last part
    gpu_memory: float | None = None  # the peak GiB of the first GPU, in the updates that were reported
    backends: list[str] = field(default_factory=list)  # those that computed the update rules
    without_kernels: list[str] = field(default_factory=list)  # those of them that took the place of missing kernels


def parse_training(log: str) -> Training:
    """Reads a log, which may be empty or end anywhere."""
    training, speeds, steps, free, epochs = Training(), [], [], [], []
    if parameters := re.findall(r"num\. shared model params: ([\d,]+)", log):
        training.parameters = int(parameters[-1].replace(",", ""))
    # Later lines of an update replace earlier ones: an interrupted training did it twice.
    last = 0
    for found in _JSON_LINE.finditer(log):
        last = found.end()
        with suppress(ValueError, KeyError):  # of a line that is cut off
            values = json.loads(found[2])
            if found[1] == "train":
                epochs.append([float(values[f"train_{name}"]) for name in ("wps", "ups", "train_wall")])
                continue
            perplexities, prefix = (training.valid, "valid_") if found[1] == "valid" else (training.train, "")
            update = int(values[f"{prefix}num_updates"])
            if f"{prefix}ppl" in values:  # not of attention that is transferred
                perplexities[update] = float(values[f"{prefix}ppl"])
            if not prefix:
                speeds.append(float(values["wps"]))
                steps.append(float(values.get("ups", 0)))
                training.seconds += float(values.get("train_wall", 0))
                free += [float(values["gb_free"])] if "gb_free" in values else []
    # A training that is shorter than --log-interval reports its epochs alone.
    if epochs and not speeds:
        speeds, steps, walls = map(list, zip(*epochs, strict=True))
        training.seconds = sum(walls)
    if speeds:
        training.speed, training.updates_per_second = median(speeds), median(steps)
    workers = re.findall(r"CUDA enviroments for all (\d+) workers", log)
    gpus = {int(rank): (name, float(memory)) for rank, memory, name in _GPU.findall(log)}
    training.gpus = [gpus[rank][0] for rank in range(int(workers[-1])) if rank in gpus] if workers else []
    # fairseq reports the memory that is free, of the first GPU.
    if free and 0 in gpus:
        training.gpu_memory = round(gpus[0][1] - min(free), 1)
    ran = list(dict.fromkeys(_BACKEND.findall(log)))
    training.backends = list(dict.fromkeys(backend for _, backend in ran))
    training.without_kernels = [backend for level, backend in ran if level == "WARNING"]
    # Of the last call: it may go on where one before it ended.
    training.finished = "| done training in " in log[last:]
    return training


def describe_training(log_end: str, updates: int) -> str:
    """How far a training has come, by the end of its log."""
    last = None
    for kind, text in _JSON_LINE.findall(log_end):
        if kind == "train_inner":
            with suppress(ValueError):  # it is being written
                last = json.loads(text)
    if last is None:
        return "starting"
    done, speed = int(last["num_updates"]), float(last["ups"])
    seconds = (updates - done) / speed if speed else None
    pace = f"{float(last['wps']):.0f} tokens/s{time_left(seconds)}"
    return f"update {done}/{updates}, loss {float(last['loss']):.2f}, {pace}"


def time_left(seconds: float | None) -> str:
    """How long something will take, for people; nothing if it is not known."""
    if seconds is None:
        return ""
    return f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"


def find_in(log: str, name: str, pattern: str) -> list[Any]:
    """The parts of a log that a pattern matches. Raises ValueError, with `name` as missing, if there are none."""
    found = re.findall(pattern, log, re.MULTILINE)
    if not found:
        raise ValueError(f"its log has no {name} in it")
    return found
