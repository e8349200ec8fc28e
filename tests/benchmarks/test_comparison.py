"""Contestants take turns within a budget; who takes no part is noted; what is timed is a call, without its launches."""

import json
import math
import time
from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import comparison, timing
from harness.cases import Shape
from harness.comparison import Case, compare, measure_all
from harness.contestants import Contestant, Refusal, Work, leaf
from harness.timing import Call, Clock, CudaClock, ProcessorClock, first_calls, time_in_turns

CASES = [Case(Shape(f"shape {i}", 1, 2, 4, 2, 2), "float32", "forward") for i in range(3)]
RATES = {"copy": {"4096": 1e9}, "matmul": {"float32": 1e9}}


class Machine(Clock):
    """Its time passes in calls alone: a second in each, half a second more in a peer's first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.hosts = 0.0, []  # and what the clock was told
        for module in (timing, comparison):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def seconds(self, call: Call, repeats: int, host: float = 0.0) -> float:
        self.hosts.append(host)
        return super().seconds(call, repeats)

    def contestant(self, name: str, factor: float = 1.0, error: Any = None) -> Contestant:
        """Its output is v times a factor, or an error: a refusal if it is not even prepared."""
        calls = []

        def prepare(shape: Shape, inputs: Any) -> Work:
            if isinstance(error, Refusal):
                raise error
            v = leaf(inputs.v)

            def forward() -> torch.Tensor:
                self.now += 1.0 if calls or name == "chunkwise" else 1.5
                calls.append(shape)
                if error is not None:
                    raise error
                return factor * v

            return Work(forward, [v], inputs.d_out)

        return Contestant(name, "sum", prepare)

    def peer(self, kind: str = "forward", longest_call: float = math.inf, **made_so: Any) -> Any:
        """The row of a peer of chunkwise, which is right; None, if it has none."""
        both = [self.contestant("chunkwise"), self.contestant("peer", **made_so)]
        how = {"device": "cpu", "clock": self, "rates": RATES, "rounds": 2, "longest_call": longest_call}
        [own, *other], _ = compare(Case(CASES[0].shape, "float32", kind), both, **how)
        assert (own["implementation"], own["status"]) == ("chunkwise", "measured")
        json.dumps([own, *other], allow_nan=False)  # they can be written
        return other[0] if other else None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("made_so", "status", "message"),
    [
        ({"factor": 1 + 1e-5}, "measured", None),
        ({"factor": 1 + 1e-5, "kind": "forward+backward"}, "measured", None),
        ({"factor": 1.01}, "failed", "wrong: its output differs by 0.01"),
        ({"factor": math.nan}, "failed", "wrong: its output differs by nan"),
        ({"error": RuntimeError("no\nkernel")}, "failed", "RuntimeError: no kernel"),
        ({"error": Refusal("unavailable", "not installed")}, "unavailable", "not installed"),
        ({"longest_call": 1.2}, "left out", "a call takes 1.5 s, over 1.2 s"),
    ],
)
def test_who_takes_no_part_says_why_unless_it_does_not_belong(made_so, status, message, machine) -> None:
    row = machine.peer(**made_so)
    assert (row["status"], row.get("message")) == (status, message)
    if status == "measured":
        assert row["difference"] == pytest.approx(1e-5, rel=0.1) and machine.hosts == [1.0] * 4
        assert row["seconds"] == {"rounds": 2, "min": 1.0, "lower": 1.0, "median": 1.0, "upper": 1.0}
        assert (row["first call"], row["second call"]) == (1.5, 1.0)
    assert machine.peer(error=Refusal()) is None


def test_what_a_budget_does_not_reach_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "Budget", lambda seconds: timing.Budget(seconds, now=lambda: machine.now))
    monkeypatch.setattr(comparison, "measure_rates", lambda *_: RATES)
    monkeypatch.setattr(comparison, "all_contestants", lambda *_: [machine.contestant("chunkwise")])
    options = Namespace(budget=5.0, device="cpu", quick=True, rounds=4, out=None, rules=())
    record = measure_all("kernels", CASES, options, 100.0, settings=1)
    assert [row["shape"] for row in record["rows"]] == ["shape 0"] and record["settings"] == 1
    missed = [f"shape {i}, float32, forward: not measured" for i in (1, 2)]
    assert record["cut"] == ["shape 0, float32, forward: 3 rounds of 4", *missed]


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
