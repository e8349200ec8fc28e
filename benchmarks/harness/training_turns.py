"""Trainings, each in a process of its own, that get ready side by side and then take turns on the device."""

import contextlib
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.timing import Budget, summarize
from harness.trainee import serve
from harness.trainings import Training

Row = dict[str, Any]

TURN_SECONDS = {"cuda": 1.0, "cpu": 3.0}
MOST_UPDATES = 40
"""Of a turn."""
FEWEST_PROCESSES = 8
"""That wait side by side, where there are fewer cores."""
PATIENCE = 120.0
"""Seconds for what takes a few; who takes longer is stuck."""
LEAST = {"cuda": 60.0, "cpu": 0.0}
"""Seconds of the budget that must be left for another group to begin."""
LONGEST_SET_UP = {"cuda": 150.0, "cpu": 600.0}
"""Seconds after which who is not ready is left out."""
WARM_UP = 5
"""Updates before the first turn."""
WAITING = 1 / 6
"""What a training takes of its memory while others have their turn, for its weights and averages: a guess."""


SECONDS_TO_END = 10.0


class Lost(Exception):
    """A training that takes no part any more: its status, and the reason."""


class Trainee:
    """A training in a process of its own, which answers after each block."""

    def __init__(self, training: Training, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._log = log
        self._process = context.Process(target=serve, args=(theirs, training, log), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, seconds: float) -> Row | None:
        """Its answer within so many seconds, None if there is none. Raises `Lost`."""
        try:
            if not self.connection.poll(seconds):
                return None
            found = self.connection.recv()
        except (EOFError, OSError):
            lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            raise Lost("failed", f"its process ended: {last[:150]}") from None
        if "status" in found:
            raise Lost(found["status"], found["message"])
        return found

    def tell(self, what: str, updates: int) -> None:
        """Lets it make updates."""
        with contextlib.suppress(OSError):  # it is gone, which its answer says better
            self.connection.send((what, updates))

    def ask(self, what: str, updates: int = 1) -> Row:
        """Lets it make updates, and returns what it says of them. Raises `Lost`."""
        self.tell(what, updates)
        found = self.answer(PATIENCE)
        if found is None:
            raise Lost("failed", f"it did not answer within {PATIENCE:.0f} s")
        return found

    def end(self) -> None:
        """Ends its process; by force, if it does not end by itself."""
        self.tell("end", 0)
        self._process.join(SECONDS_TO_END)
        self._process.kill()
        self._process.join()


def groups(trainings: Sequence[tuple[Training, int]], room: float, most: int) -> Iterator[list[tuple[Training, int]]]:
    """Divides trainings, in their order, into groups of at most `most` that fit into the room while they wait.

    With each comes a guess of the GiB that it takes at work.
    """
    group: list[tuple[Training, int]] = []
    for training, memory in trainings:
        if group and (len(group) == most or WAITING * (memory + sum(each for _, each in group)) > room):
            yield group
            group = []
        group.append((training, memory))
    if group:
        yield group


def get_ready(
    group: Sequence[tuple[Training, int]],
    start: Callable[[Training], Trainee],
    room: float,
    seconds: float,
    rows: dict[Training, Row],
) -> dict[Training, tuple[Trainee, float]]:
    """Starts all trainings, and lets as many at a time as there is room for compile and make their first updates.

    Returns those that are ready, with the seconds of an update of each; `rows` gets a row for each of the others. Who
    needs more than the room gets ready alone.
    """
    deadline = time.monotonic() + seconds
    loading = {training: start(training) for training, _ in group}
    loaded: list[Training] = []
    warming: dict[Training, Trainee] = {}
    ready: dict[Training, tuple[Trainee, float]] = {}
    sizes, trainees = dict(group), dict(loading)
    while loading or loaded or warming:
        for training, trainee in [*loading.items(), *warming.items()]:
            try:
                found = trainee.answer(0.02)
            except Lost as reason:
                rows[training] = _lost(reason)
                trainee.end()
                loading.pop(training, None)
                warming.pop(training, None)
                continue
            if found is None:
                continue
            if loading.pop(training, None):
                loaded.append(training)
            else:
                del warming[training]
                ready[training] = trainee, found["seconds"] / WARM_UP
        while loaded and (not warming or sum(sizes[each] for each in (*warming, loaded[0])) <= room):
            first = loaded.pop(0)
            warming[first] = trainees[first]
            warming[first].tell("time", WARM_UP)
        if time.monotonic() > deadline:
            for training in (*loading, *loaded, *warming):
                rows[training] = _lost(Lost("left out", f"not ready after {seconds:.0f} s"))
                trainees[training].end()
            break
    return {training: ready[training] for training, _ in group if training in ready}


def take_turns(
    ready: dict[Training, tuple[Trainee, float]],
    device: str,
    rounds: int,
    until: Callable[[], float],
    rows: dict[Training, Row],
) -> int:
    """Times the trainings in turns, A B C A B C ..., and adds a row for each; returns the rounds that were made.

    One round is made in any case, others while `until` says that there are seconds left.
    """
    taken: dict[Training, list[Row]] = {training: [] for training in ready}
    made = 0
    while made < rounds and ready and (not made or until() > 0):
        for training, (trainee, seconds) in list(ready.items()):
            updates = max(2, min(MOST_UPDATES, math.ceil(TURN_SECONDS[device] / max(seconds, 1e-6))))
            try:
                turn = trainee.ask("time", updates)
                taken[training].append(turn | {"updates": updates})
                ready[training] = trainee, turn["seconds"] / updates
            except Lost as reason:
                rows[training] = _lost(reason)
                trainee.end()
                del ready[training]
        made += 1
    for training, (trainee, _) in ready.items():
        try:
            rows[training] = _row(taken[training], trainee.ask("profile"))
        except Lost as reason:
            rows[training] = _lost(reason)
        trainee.end()
    return made


def _lost(reason: Lost) -> Row:
    return {"status": reason.args[0], "message": reason.args[1]}


def _row(turns: Sequence[Row], profiled: Row) -> Row:
    """Measurements of a training: its speed, its memory, and what an update starts.

    How long the GPU is busy is the time in which it does something in the update that was profiled, over the time of
    one that was not, as a profiler lets the CPU take longer.
    """
    speeds = summarize([turn["words"] / turn["seconds"] for turn in turns])
    seconds = summarize([turn["seconds"] / turn["updates"] for turn in turns])
    row = {"status": "measured", "words per second": speeds, "seconds": seconds}
    row |= {"peak bytes": max(turn["memory"] for turn in turns), "operators": profiled["operators"]}
    on_gpu = profiled.get("kernels")
    busy = min(1.0, profiled["kernel seconds"] / seconds["median"]) if on_gpu else None
    return row | {"kernels": on_gpu or None, "busy": busy, "waits": profiled.get("waits")}


def measure(
    trainings: Sequence[tuple[Training, int]],
    folder: Path,
    device: str,
    rounds: int,
    budget: Budget,
    save: Callable[[list[Row]], Any],
    memory: float,
) -> None:
    """Measures all trainings, a group after the other, and saves the rows after each.

    `memory`: GiB of the GPU, of which 0.4 are for those that wait and 0.5 for those that get ready; infinite on a CPU,
    whose cores those that get ready want one by one.
    """
    rows: dict[Training, Row] = {}
    cores = os.cpu_count() or 1
    # Several compile at the same time.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // 4)))
    logs = itertools.count()

    def start(training: Training) -> Trainee:
        return Trainee(training, folder / f"{next(logs)}.log")

    for number, group in enumerate(groups(trainings, 0.4 * memory, max(FEWEST_PROCESSES, cores))):
        if number and budget.left <= LEAST[device]:
            budget.cut += [f"{training}: not measured" for training, _ in group]
            continue
        room = 0.5 * memory if device == "cuda" else 0.0
        ready = get_ready(group, start, room, min(LONGEST_SET_UP[device], max(budget.left, 0)), rows)
        made = take_turns(ready, device, rounds, lambda: budget.left, rows)
        if made < rounds:
            budget.cut += [f"{training}: {made} rounds of {rounds}" for training in ready]
        for training, _ in group:
            row = rows[training]
            told = f"{row['words per second']['median']:,.0f} words/s" if "seconds" in row else row["message"]
            print(f"{training}: {told}", file=sys.stderr, flush=True)
        save([_named(training, rows[training]) for training, _ in trainings if training in rows])


def _named(training: Training, row: Row) -> Row:
    return {"part": training.part, "model": training.model, "implementation": training.implementation, **row}
