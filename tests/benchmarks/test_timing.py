"""Contestants take turns within a budget, and what is timed is a call, on a GPU without its launches."""

import math
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from harness import timing
from harness.timing import TOKENS_OF_A_TURN, Clock, CudaClock, ProcessorClock, first_calls, time_in_turns


@pytest.mark.parametrize(("allowed", "rounds", "made"), [(math.inf, 20, 20), (50.0, 20, 10), (0.0, 20, 3), (0.0, 2, 2)])
def test_contestants_take_turns_that_are_cut_to_what_is_allowed_but_not_below_three(allowed, rounds, made) -> None:
    order: list[str] = []
    warm = {"a": (1.0, 0.0), "b": (0.5, 0.0), "c": (3.0, 0.0)}
    calls = {name: lambda name=name: order.append(name) or warm[name][0] for name in warm}
    clock = SimpleNamespace(  # calls take the time that they return
        seconds=lambda call, repeats, host: sum(call() for _ in range(repeats)) / repeats,
        repeats=lambda seconds: 2 if seconds < 1 else 1,
    )
    seconds, rounds_made = time_in_turns(calls, warm, clock, rounds, allowed)
    assert order == ["a", "b", "b", "c"] * made and rounds_made == made
    assert all((seconds[x]["median"], seconds[x]["rounds"]) == (warm[x][0], made) for x in warm)


@pytest.mark.parametrize(("allowed", "rounds"), [(math.inf, 5), (0.0, 3)])
def test_a_turn_of_each_does_not_count_nor_does_the_first_token_of_a_turn(allowed, rounds, monkeypatch) -> None:
    made: list[str] = []

    class CountingClock(Clock):
        def seconds(self, call: Callable[[], Any], repeats: int, host: float = 0.0) -> float:
            made.append("timed")
            return super().seconds(call, repeats)

    monkeypatch.setattr(timing, "clock_for", lambda device: CountingClock())
    take_ups = {name: lambda name=name: made.append("taken up") or (lambda: made.append(name)) for name in "ab"}
    budget = timing.Budget(2 * allowed, now=lambda: 0.0)
    seconds = timing.time_tokens(take_ups, "cpu", 5, budget, parts=2, what="after 9")
    assert made == [x for name in "ab" for x in ("taken up", name, "timed", *[name] * TOKENS_OF_A_TURN)] * (rounds + 1)
    assert [seconds[name]["rounds"] for name in "ab"] == [rounds] * 2
    assert budget.cut == ([] if rounds == 5 else ["after 9: 3 rounds of 5"])


class SimulatedGpu:
    """torch.cuda where launches take the host's time, kernels the device's, and these come in the order of launches:
    the seconds when the host is ready for the next launch, and the device done with those before it."""

    LAUNCH, FLUSH, RECORD = 10e-6, 65e-6, 1e-6
    uint8 = None

    def __init__(self) -> None:
        self.cuda = self
        self.host = self.device = 0.0
        self.flushes = 0

    def launch(self, seconds: float) -> None:
        self.host += self.LAUNCH
        self.device = max(self.host, self.device) + seconds

    def zero_(self) -> None:
        self.flushes += 1
        self.launch(self.FLUSH)

    def empty(self, size: int, dtype: Any, device: str) -> Any:
        return self

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(time=None, synchronize=self.synchronize)

        def record() -> None:
            self.host += self.RECORD
            event.time = max(self.host, self.device)

        event.record, event.elapsed_time = record, lambda end: (end.time - event.time) * 1e3
        return event


# Where no lead is long enough, the launches are timed too.
@pytest.mark.parametrize(
    ("launches", "each", "flushes"), [(1, 2e-6, 1), (14, 2e-6, 5), (300, 2e-6, 64), (1000, 1e-5, 1)]
)
def test_a_short_call_on_a_gpu_is_timed_without_its_launches(launches, each, flushes, monkeypatch) -> None:
    gpu = SimulatedGpu()
    monkeypatch.setattr(timing, "torch", gpu)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.host)

    def call() -> None:
        for _ in range(launches):
            gpu.launch(2e-6)

    warm, host = first_calls(call, gpu.synchronize)[1:]
    assert host == pytest.approx(launches * gpu.LAUNCH)  # without the wait
    clock = CudaClock()
    gpu.flushes = 0
    measured, _ = time_in_turns({"call": call}, {"call": (warm, host)}, clock, 3)
    assert measured["call"]["min"] == pytest.approx(launches * each, rel=0.01) == measured["call"]["upper"]
    assert gpu.flushes == 3 * flushes


def test_waiting_is_no_time_of_the_processor() -> None:
    wait, half = partial(time.sleep, 0.2), 0.1
    assert Clock().seconds(wait, 1) >= half > ProcessorClock().seconds(wait, 1)
