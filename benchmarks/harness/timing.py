"""Timing in turns: A B C A B C ..., so that whatever else the machine does falls on all of them alike."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

ROUNDS = 15
FEWEST_ROUNDS = 3
# On a CPU a measurement lasts at least this long; shorter calls are repeated within it.
SHORTEST_MEASUREMENT = 1e-3
# On a GPU the lead is the host's time so many times over, and so many flushes at most: a host that takes longer has
# more launches to make than the queue to the device holds, about a thousand, and waits for the device all the same.
LEAD_MARGIN = 2.0
MOST_FLUSHES = 64
TOKENS_OF_A_TURN = 3


class Clock:
    """The time that passes."""

    def read(self) -> float:
        """The time that it shows, in seconds."""
        return time.perf_counter()

    def seconds(self, call: Call, repeats: int, host: float = 0.0) -> float:
        """The time of one call, of `repeats` made; `host` seconds, in which it gives the device work, may not count."""
        start = self.read()
        for _ in range(repeats):
            call()
        return (self.read() - start) / repeats

    def repeats(self, seconds: float) -> int:
        """How often to repeat a call that takes this long."""
        return max(1, math.ceil(SHORTEST_MEASUREMENT / max(seconds, 1e-6)))


class ProcessorClock(Clock):
    """The time that the process computes, in all of its threads: what others do on the machine is not in it."""

    def read(self) -> float:
        return time.process_time()


class CudaClock(Clock):
    """Events around a call, after flushes: writing more than the second-level cache holds, again and again.

    While the GPU writes, the host gives it the whole call: what is timed is the device's work, unless a call makes the
    host wait for the device, or no lead is long enough.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self._flush_seconds = self._between_events(self._buffer.zero_, 10, flushes=1)

    def seconds(self, call: Call, repeats: int, host: float = 0.0) -> float:
        flushes = max(1, math.ceil(LEAD_MARGIN * repeats * host / self._flush_seconds))
        # A lead that ended within a call would leave a part of the host's time, of unknown size, in what is measured.
        too_long = repeats * host > MOST_FLUSHES * self._flush_seconds
        return self._between_events(call, repeats, 1 if too_long else min(flushes, MOST_FLUSHES))

    def _between_events(self, call: Call, repeats: int, flushes: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(flushes):
            self._buffer.zero_()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def repeats(self, seconds: float) -> int:
        return 1


class TurnClock(Clock):
    """Times some tokens one after the other, of a generation that each turn takes up: a call gives what makes a token.

    The token before them is not timed. It finds memory as the other contestants left it; in generation, a token finds
    it as the token before left it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def seconds(self, call: Callable[[], Call], repeats: int, host: float = 0.0) -> float:
        step = call()
        step()
        return self._clock.seconds(step, repeats, host)

    def repeats(self, seconds: float) -> int:
        return TOKENS_OF_A_TURN


def clock_for(device: str) -> Clock:
    return CudaClock() if device == "cuda" else Clock()


class Budget:
    """Seconds to spend, None for no limit, and a list of what was cut to keep to them."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = math.inf if seconds is None else now() + seconds
        self.cut: list[str] = []

    @property
    def left(self) -> float:
        return self._end - self._now()

    def share(self, parts: int) -> float:
        """The seconds that each of so many parts to come may take."""
        return self.left / max(parts, 1)


def first_calls(call: Call, synchronize: Call, longest: float = math.inf) -> tuple[float, float, float]:
    """The seconds of the first two calls, until the device has finished, and of the second until it had its work.

    Where the first takes longer than `longest` there is no second, and its time stands for both.
    """

    def seconds() -> tuple[float, float]:
        synchronize()
        start = time.perf_counter()
        call()
        given = time.perf_counter()
        synchronize()
        return time.perf_counter() - start, given - start

    first, host = seconds()
    return first, *((first, host) if first > longest else seconds())


def time_in_turns(
    calls: dict[str, Call], warm: dict[str, tuple[float, float]], clock: Clock, rounds: int, allowed: float = math.inf
) -> tuple[dict[str, dict[str, float]], int]:
    """Times calls against each other; `warm` has about what each takes, and the time in which the host gives it work.

    Each is measured in `rounds` rounds if `allowed` seconds are enough for it, in `FEWEST_ROUNDS` in any case. Returns
    by name what `summarize` makes of a contestant's times, and the number of rounds that were made.
    """
    repeats = {name: clock.repeats(warm[name][0]) for name in calls}
    a_round = sum(repeats[name] * warm[name][0] for name in calls)
    if math.isfinite(allowed) and a_round > 0:
        rounds = max(min(rounds, FEWEST_ROUNDS), min(rounds, int(allowed / a_round)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock.seconds(call, repeats[name], warm[name][1]))
    return {name: summarize(measured) for name, measured in times.items()}, rounds


def time_tokens(
    take_ups: dict[str, Callable[[], Call]], device: str, rounds: int, budget: Budget, parts: int, what: str
) -> dict[str, dict[str, float]]:
    """Times a token of generations that `TurnClock` takes up: a turn of each that does not count, then the rounds.

    It may take the budget's share of so many parts, which notes what was cut of them.
    """
    clock, allowed = TurnClock(clock_for(device)), budget.share(parts)
    warm = {}
    began = time.perf_counter()
    for name, take_up in take_ups.items():
        start = time.perf_counter()
        clock.seconds(take_up, TOKENS_OF_A_TURN)
        warm[name] = (time.perf_counter() - start) / TOKENS_OF_A_TURN, 0.0
    left = max(0.0, allowed - (time.perf_counter() - began))
    seconds, made = time_in_turns(take_ups, warm, clock, rounds, left)
    if made < rounds:
        budget.cut.append(f"{what}: {made} rounds of {rounds}")
    return seconds


def summarize(times: Sequence[float]) -> dict[str, float]:
    """Statistics of some measurements, one at least: "rounds", "min", "lower" and "upper" quartile, "median"."""
    lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return {"rounds": len(times), "min": min(times), "lower": lower, "median": middle, "upper": upper}
