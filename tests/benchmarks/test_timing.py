from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.spread import summarize
from harness.timing import Budget, CpuClock, first_calls, time_in_turns


class FakeClock:
    """Calls take the time that they return."""

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        return sum(call() for _ in range(repeats)) / repeats

    def repeats(self, seconds: float) -> int:
        return 2 if seconds < 1 else 1


def test_contestants_take_turns() -> None:
    order: list[str] = []

    def contestant(name: str, seconds: float) -> Callable[[], float]:
        def call() -> float:
            order.append(name)
            return seconds

        return call

    calls = {"a": contestant("a", 1.0), "b": contestant("b", 0.5), "c": contestant("c", 3.0)}
    result, made = time_in_turns(calls, {"a": 1.0, "b": 0.5, "c": 3.0}, FakeClock(), rounds=3)
    assert order == ["a", "b", "b", "c"] * 3 and made == 3
    assert {name: values["median"] for name, values in result.items()} == {"a": 1.0, "b": 0.5, "c": 3.0}


@pytest.mark.parametrize(
    ("allowed", "rounds", "made"),
    [(float("inf"), 20, 20), (100.0, 20, 20), (50.0, 20, 10), (1.0, 20, 3), (0.0, 20, 3), (0.0, 2, 2)],
)
def test_rounds_are_cut_to_the_time_that_is_allowed_but_not_below_three(allowed: float, rounds: int, made: int) -> None:
    result = time_in_turns({"a": lambda: 5.0}, {"a": 5.0}, FakeClock(), rounds=rounds, allowed=allowed)
    assert result[1] == made and result[0]["a"]["rounds"] == made


def test_a_call_that_takes_too_long_is_made_once() -> None:
    calls: list[str] = []
    first, second = first_calls(lambda: calls.append("call"), lambda: calls.append("wait"), longest=-1.0)
    assert calls == ["wait", "call", "wait"] and first == second
    first_calls(lambda: calls.append("call"), lambda: calls.append("wait"))
    assert calls[3:] == ["wait", "call", "wait"] * 2


def test_short_calls_are_repeated_within_a_measurement() -> None:
    clock = CpuClock()
    assert clock.repeats(1e-4) == 10 and clock.repeats(1.0) == 1
    made = []
    assert 0 < clock.seconds(lambda: made.append(1), 7) < 1 and len(made) == 7


def test_a_budget_is_shared_by_what_is_to_come() -> None:
    time = [100.0]
    budget = Budget(60.0, now=lambda: time[0])
    assert budget.share(6) == 10.0
    time[0] = 130.0
    assert budget.share(3) == 10.0
    time[0] = 170.0
    assert budget.left < 0
    assert Budget(None).share(3) == float("inf")


def test_a_summary_has_the_median_and_the_quartiles() -> None:
    assert summarize([5.0, 1.0, 3.0, 2.0, 4.0]) == {"rounds": 5, "min": 1.0, "lower": 2.0, "median": 3.0, "upper": 4.0}
    assert summarize([2.0]) == {"rounds": 1, "min": 2.0, "lower": 2.0, "median": 2.0, "upper": 2.0}
    with pytest.raises(ValueError, match="times is empty"):
        summarize([])
