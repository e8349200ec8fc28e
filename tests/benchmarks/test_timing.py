"""Contestants take turns within a budget, and what is timed is a call, on a GPU without its launches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from harness import timing
from harness.timing import (
    MOST_FLUSHES,
    TOKENS_OF_A_TURN,
    Budget,
    Clock,
    CudaClock,
    TurnClock,
    first_calls,
    flushes_ahead,
    summarize,
    time_in_turns,
    time_tokens,
)


class FakeClock(Clock):
    """Calls take the time that they return."""

    def seconds(self, call: Callable[[], Any], repeats: int, host: float = 0.0) -> float:
        return sum(call() for _ in range(repeats)) / repeats

    def repeats(self, seconds: float) -> int:
        return 2 if seconds < 1 else 1


def test_contestants_take_turns() -> None:
    order: list[str] = []
    warm = {"a": 1.0, "b": 0.5, "c": 3.0}
    calls = {name: lambda name=name: order.append(name) or warm[name] for name in warm}
    result, made = time_in_turns(calls, warm, FakeClock(), rounds=3)
    assert order == ["a", "b", "b", "c"] * 3 and made == 3
    assert {name: values["median"] for name, values in result.items()} == warm


@pytest.mark.parametrize(
    ("allowed", "rounds", "made"),
    [(float("inf"), 20, 20), (100.0, 20, 20), (50.0, 20, 10), (1.0, 20, 3), (0.0, 20, 3), (0.0, 2, 2)],
)
def test_rounds_are_cut_to_the_time_that_is_allowed_but_not_below_three(allowed: float, rounds: int, made: int) -> None:
    result = time_in_turns({"a": lambda: 5.0}, {"a": 5.0}, FakeClock(), rounds=rounds, allowed=allowed)
    assert result[1] == made and result[0]["a"]["rounds"] == made


def test_the_first_token_of_a_turn_is_not_timed() -> None:
    turns: list[list[str]] = []

    def take_up() -> Callable[[], None]:
        turns.append([])
        return lambda: turns[-1].append("token")

    class CountingClock(Clock):
        def seconds(self, call: Callable[[], Any], repeats: int, host: float = 0.0) -> float:
            assert turns[-1] == ["token"]
            return super().seconds(call, repeats)

    clock = TurnClock(CountingClock())
    assert clock.repeats(1e-6) == clock.repeats(10.0) == TOKENS_OF_A_TURN
    clock.seconds(take_up, 3)
    clock.seconds(take_up, 3)
    assert turns == [["token"] * 4] * 2


@pytest.mark.parametrize(("allowed", "rounds"), [(float("inf"), 5), (0.0, 3)])
def test_a_turn_of_each_does_not_count(allowed: float, rounds: int) -> None:
    made: list[str] = []
    take_ups = {name: lambda name=name: lambda: made.append(name) for name in "ab"}
    seconds, rounds_made = time_tokens(take_ups, "cpu", 5, Budget(allowed))
    assert made == [name for name in "ab" for _ in range(TOKENS_OF_A_TURN + 1)] * (rounds + 1)
    assert rounds_made == rounds and [seconds[name]["rounds"] for name in "ab"] == [rounds] * 2


class SimulatedGpu:
    """torch.cuda where launches take the host's time, kernels the device's, and these come in the order of launches.

    Attributes:
        host, device: seconds; when the host is ready for the next launch, and the device done with those before it.
    """

    LAUNCH, FLUSH, RECORD = 10e-6, 65e-6, 1e-6
    uint8 = None

    def __init__(self) -> None:
        self.cuda = self
        self.host = self.device = 0.0
        self.flushes = 0

    def launch(self, seconds: float) -> None:
        self.host += self.LAUNCH
        self.device = max(self.host, self.device) + seconds

    def empty(self, size: int, dtype: Any, device: str) -> Any:
        def zero_() -> None:
            self.flushes += 1
            self.launch(self.FLUSH)

        return SimpleNamespace(zero_=zero_)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(time=None)

        def record() -> None:
            self.host += self.RECORD
            event.time = max(self.host, self.device)

        event.record, event.synchronize = record, self.synchronize
        event.elapsed_time = lambda end: (end.time - event.time) * 1e3
        return event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    gpu = SimulatedGpu()
    monkeypatch.setattr(timing, "torch", gpu)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.host)
    return gpu


@pytest.mark.parametrize("launches", [1, 13, 75, 300])
def test_a_short_call_on_a_gpu_is_timed_without_its_launches(gpu: SimulatedGpu, launches: int) -> None:
    def call() -> None:
        for _ in range(launches):
            gpu.launch(2e-6)

    warm, host = first_calls(call, gpu.synchronize)[1:]
    assert host == pytest.approx(launches * gpu.LAUNCH)  # without the wait
    measured, _ = time_in_turns({"call": call}, {"call": warm}, CudaClock(), hosts={"call": host})
    assert measured["call"]["min"] == pytest.approx(launches * 2e-6) == measured["call"]["upper"]


def test_where_no_lead_is_long_enough_the_launches_are_timed_too(gpu: SimulatedGpu) -> None:
    def call() -> None:
        for _ in range(1000):
            gpu.launch(2e-6)

    clock = CudaClock()
    gpu.flushes = 0
    assert clock.seconds(call, 1, host=1000 * gpu.LAUNCH) == pytest.approx(1000 * gpu.LAUNCH, rel=0.01)
    assert gpu.flushes == 1


def test_a_lead_outlasts_the_host_with_a_margin_and_is_bounded() -> None:
    hosts = {0.0: 1, 30e-6: 1, 130e-6: 4, 750e-6: 24, 0.75 * MOST_FLUSHES * 65e-6: MOST_FLUSHES}
    hosts |= {1.25 * MOST_FLUSHES * 65e-6: 1}
    assert {host: flushes_ahead(host, 65e-6) for host in hosts} == hosts


def test_a_call_that_takes_too_long_is_made_once(gpu: SimulatedGpu) -> None:
    calls: list[str] = []
    for longest, made in ((1e-6, 1), (1.0, 2)):
        calls.clear()
        first, second, _ = first_calls(lambda: calls.append("call") or gpu.launch(1e-3), gpu.synchronize, longest)
        assert len(calls) == made and first == pytest.approx(second) and first > 1e-3


def test_short_calls_are_repeated_within_a_measurement() -> None:
    clock, made = Clock(), []
    assert clock.repeats(1e-4) == 10 and clock.repeats(1.0) == 1
    assert clock.seconds(lambda: made.append(1), 7) > 0 and len(made) == 7


def test_a_budget_is_shared_by_what_is_to_come() -> None:
    now = [100.0]
    budget = Budget(60.0, now=lambda: now[0])
    assert budget.share(6) == 10.0
    now[0] = 130.0
    assert budget.share(3) == 10.0
    now[0] = 170.0
    assert budget.left < 0 and Budget(None).share(3) == float("inf")


def test_a_summary_has_the_median_and_the_quartiles() -> None:
    assert summarize([5.0, 1.0, 3.0, 2.0, 4.0]) == {"rounds": 5, "min": 1.0, "lower": 2.0, "median": 3.0, "upper": 4.0}
    assert summarize([2.0]) == {"rounds": 1, "min": 2.0, "lower": 2.0, "median": 2.0, "upper": 2.0}
