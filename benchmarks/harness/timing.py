"""Timing in turns: A B C A B C ..., so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from harness.spread import summarize

Call = Callable[[], Any]

ROUNDS = 15
FEWEST_ROUNDS = 3
# On a CPU a measurement lasts at least this long; shorter calls are repeated within it.
SHORTEST_MEASUREMENT = 1e-3


class Clock(Protocol):
    def seconds(self, call: Call, repeats: int) -> float:
        """The time of one call, of `repeats` made."""
        ...

    def repeats(self, seconds: float) -> int:
        """How often to repeat a call that takes this long."""
        ...


class CpuClock:
    """The time that passes."""

    def seconds(self, call: Call, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    def repeats(self, seconds: float) -> int:
        return max(1, math.ceil(SHORTEST_MEASUREMENT / max(seconds, 1e-6)))


class CudaClock:
    """Events around a call, after writing more than the second-level cache holds.

    While the GPU writes, the CPU gets ahead: what is timed is the device's work, unless a call makes the GPU wait.
    """

    def __init__(self) -> None:
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def seconds(self, call: Call, repeats: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def repeats(self, seconds: float) -> int:
        return 1


def clock_for(device: str) -> Clock:
    return CudaClock() if device == "cuda" else CpuClock()


class Budget:
    """Seconds to spend, None for no limit, and a list of what was cut to keep to them."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = None if seconds is None else now() + seconds
        self.cut: list[str] = []

    @property
    def left(self) -> float:
        return math.inf if self._end is None else self._end - self._now()

    def share(self, parts: int) -> float:
        """What each of so many parts to come may take."""
        return self.left / max(parts, 1)


def first_calls(call: Call, synchronize: Call, longest: float = math.inf) -> tuple[float, float]:
    """The first two calls in seconds on the host's clock, each until the device has finished.

    Where the first takes longer than `longest` there is no second, and its time stands for both.
    """

    def seconds() -> float:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - start

    first = seconds()
    return first, first if first > longest else seconds()


def time_in_turns(
    calls: dict[str, Call],
    warm: dict[str, float],
    clock: Clock,
    *,
    rounds: int = ROUNDS,
    allowed: float = math.inf,
) -> tuple[dict[str, dict[str, float]], int]:
    """Times calls against each other. They have been warmed up before.

    Args:
        warm: about how long each call takes, in seconds.
        rounds: how often each is measured, if `allowed` seconds are enough for it; `FEWEST_ROUNDS` in any case.

    Returns:
        by name what `spread.summarize` makes of a contestant's times, and the number of rounds that were made.
    """
    repeats = {name: clock.repeats(warm[name]) for name in calls}
    a_round = sum(repeats[name] * warm[name] for name in calls)
    if math.isfinite(allowed) and a_round > 0:
        rounds = max(min(rounds, FEWEST_ROUNDS), min(rounds, int(allowed / a_round)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock.seconds(call, repeats[name]))
    return {name: summarize(measured) for name, measured in times.items()}, rounds


def synchronizer(device: str) -> Call:
    """What waits until the device has done what it was given."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def describe(error: BaseException) -> str:
    """An error on one line, cut to a readable length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:197]}..."
