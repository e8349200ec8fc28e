"""Contestants take turns within a budget, and what is timed is a call, on a GPU without its launches."""

import math
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from harness import timing
from harness.timing import Clock, CudaClock, ProcessorClock, first_calls, time_in_turns


@pytest.mark.parametrize(("allowed", "rounds", "made"), [(math.inf, 20, 20), (50.0, 20, 10), (0.0, 20, 3), (0.0, 2, 2)])
def test_turns_are_cut_to_what_is_allowed_but_not_below_three(allowed: float, rounds: int, made: int) -> None:
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


class SimulatedGpu:
    """torch.cuda where launches take the host's time, kernels the device's, and these come in the order of launches."""

    LAUNCH, FLUSH, RECORD, uint8 = 10e-6, 65e-6, 1e-6, None

    def __init__(self) -> None:
        self.cuda, self.empty = self, lambda size, dtype, device: self
        self.host = self.device = 0.0  # when each is done with what came before
        self.flushes = 0

    def launch(self, seconds: float) -> None:
        self.host += self.LAUNCH
        self.device = max(self.host, self.device) + seconds

    def zero_(self) -> None:
        self.flushes += 1
        self.launch(self.FLUSH)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def Event(self, enable_timing: bool) -> Any:
        def record() -> None:
            self.host += self.RECORD
            event.time = max(self.host, self.device)

        event = SimpleNamespace(time=None, synchronize=self.synchronize, record=record)
        event.elapsed_time = lambda end: (end.time - event.time) * 1e3
        return event


# Where no lead is long enough, the launches are timed too.
@pytest.mark.parametrize(
    ("launches", "each", "flushes"), [(1, 2e-6, 1), (14, 2e-6, 5), (300, 2e-6, 64), (1000, 1e-5, 1)]
)
def test_a_short_call_on_a_gpu_is_timed_without_its_launches(launches, each, flushes, monkeypatch) -> None:
    gpu = SimulatedGpu()
    monkeypatch.setattr(timing, "torch", gpu)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.host)
    call = lambda: [gpu.launch(2e-6) for _ in range(launches)]  # noqa: E731
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
