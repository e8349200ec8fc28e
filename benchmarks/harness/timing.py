"""Timing in turns, A B C A B C ...: other work on the machine slows down all of them alike. Memory of a call."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

Call = Callable[[], Any]
T = TypeVar("T")

ROUNDS = 15
FEWEST_ROUNDS = 3
# On a CPU a measurement lasts at least this long; shorter calls are repeated within it.
SHORTEST_MEASUREMENT = 1e-3
# On a GPU flushes give the host a lead of so many times its own time, and of so many flushes at most: a host that takes
# longer has more launches than the device's queue holds, about a thousand, and waits for the device in any case.
LEAD_MARGIN = 2.0
MOST_FLUSHES = 64
TOKENS_OF_A_TURN = 3


class Clock:
    """Wall-clock time."""

    def read(self) -> float:
        """Now, in seconds."""
        return time.perf_counter()

    def seconds(self, call: Call, repeats: int, host: float = 0.0) -> float:
        """The mean time of `repeats` calls; on a GPU without the `host` seconds of launching a call."""
        start = self.read()
        for _ in range(repeats):
            call()
        return (self.read() - start) / repeats

    def repeats(self, seconds: float) -> int:
        """The repetitions of a call that takes so many seconds."""
        return max(1, math.ceil(SHORTEST_MEASUREMENT / max(seconds, 1e-6)))


class ProcessorClock(Clock):
    """CPU time of the process, all threads together, without other work on the machine."""

    def read(self) -> float:
        return time.process_time()


class CudaClock(Clock):
    """Events around a call, after flushes, each of which overwrites the second-level cache.

    During the flushes the host launches the whole call: only the device's work is timed, unless the call makes the host
    wait for the device, or the lead of the flushes is too short.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self._flush_seconds = self._between_events(self._buffer.zero_, 10, flushes=1)

    def seconds(self, call: Call, repeats: int, host: float = 0.0) -> float:
        flushes = max(1, math.ceil(LEAD_MARGIN * repeats * host / self._flush_seconds))
        # A lead that ends within a call would add a part of the host's time, of unknown size.
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
    """Times successive decode steps of a generation that is continued in each turn; a call returns the step's function.

    The first step of a turn is not timed: it finds the caches as the other implementations have left them.
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
    """Seconds to spend, None for no limit, and a list of the measurements that were cut for it."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = math.inf if seconds is None else now() + seconds
        self.cut: list[str] = []

    @property
    def left(self) -> float:
        return self._end - self._now()

    def share(self, parts: int) -> float:
        """The seconds for each of so many parts to come."""
        return self.left / max(parts, 1)


def first_calls(call: Call, synchronize: Call, longest: float = math.inf) -> tuple[float, float, float]:
    """Seconds of the first call and of the second, and the host's seconds of launching the latter.

    If the first takes longer than `longest` there is no second, and its time stands for both.
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
    """Times calls in turns; `warm` has the approximate seconds of each, and the host's seconds of launching it.

    There are `rounds` rounds if `allowed` seconds are enough for them, and `FEWEST_ROUNDS` in any case. Returns the
    statistics (`summarize`) by name, and the number of rounds.
    """
    repeats = {name: clock.repeats(warm[name][0]) for name in calls}
    a_round = sum(repeats[name] * warm[name][0] for name in calls)
    # A budget cuts rounds, never below FEWEST_ROUNDS: a median needs some.
    if math.isfinite(allowed) and a_round > 0:
        rounds = max(min(rounds, FEWEST_ROUNDS), min(rounds, int(allowed / a_round)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock.seconds(call, repeats[name], warm[name][1]))
    return {name: summarize(measured) for name, measured in times.items()}, rounds


def time_tokens(
    take_ups: dict[str, Callable[[], Call]], device: str, rounds: int, budget: Budget, parts: int, label: str
) -> dict[str, dict[str, float]]:
    """Times decode steps by `TurnClock`, after a turn of each that does not count, within a share of the budget."""
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
        budget.cut.append(f"{label}: {made} rounds of {rounds}")
    return seconds


def summarize(times: Sequence[float]) -> dict[str, float]:
    """Statistics of some measurements, one at least: "rounds", "min", "lower" and "upper" quartile, "median"."""
    lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return {"rounds": len(times), "min": min(times), "lower": lower, "median": middle, "upper": upper}


def peak(prepare: Callable[[], T], call: Callable[[T], Any], device: str) -> int:
    """Peak bytes during `call` of the tensors that `prepare` has made and of the call's own.

    On a CPU torch's profiler reports the memory of tensors, without memory that kernels allocate by themselves.
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        prepared = prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        kept = call(prepared)
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or it reports every start and stop
    # The profiler has to see the state being made: otherwise its release would not be reported.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepared = prepare()
        with record_function("harness.timing.peak"):
            kept = call(prepared)
    del kept, prepared
    events = profiler.profiler.kineto_results.events()
    [start] = [event.start_ns() for event in events if event.name() == "harness.timing.peak"]
    most = size = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        size += event.nbytes()
        most = size if event.start_ns() < start else max(most, size)
    return most


def held(state: Any) -> int:
    """Bytes of the tensors in nested dictionaries and lists."""
    return sum(x.nbytes for x in tree_leaves(state) if isinstance(x, Tensor))
