"""Turns within a budget, clocks, bytes, operations and memory, targets, and the page of the records."""

import json
import math
import re
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import report
import torch
from harness import comparison, targets, timing
from harness.cases import RULES, Shape, draw_inputs
from harness.comparison import Case, compare, limit_of, measure_all
from harness.implementations import Implementation, Refusal, Work, all_implementations, leaf
from harness.pages import ratio
from harness.targets import Failure, judge
from harness.timing import Call, Clock, CudaClock, ProcessorClock, first_calls, held, peak, time_in_turns

CASES = [Case(Shape(f"shape {i}", 1, 2, 4, 2, 2), "float32", "forward") for i in range(3)]
RATES = {"copy": {"4096": 1e9}, "matmul": {"float32": 1e9}}


class Machine(Clock):
    """A simulated clock: a call takes a second, the first call of a peer half a second more."""

    def __init__(self) -> None:
        self.now, self.hosts = 0.0, []  # hosts: the seconds that were passed to it

    def seconds(self, call: Call, repeats: int, host: float = 0.0) -> float:
        self.hosts.append(host)
        return super().seconds(call, repeats)

    def implementation(self, name: str, factor: float = 1.0, error: Any = None) -> Implementation:
        """Its output is v times `factor`, or it raises `error`, a refusal already when it is prepared."""
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

        return Implementation(name, "sum", prepare)

    def peer(self, kind: str = "forward", longest_call: float = math.inf, **made_so: Any) -> Any:
        """The row of a peer of chunkwise, or None."""
        both = [self.implementation("chunkwise"), self.implementation("peer", **made_so)]
        how = {"device": "cpu", "clock": self, "rates": RATES, "rounds": 2, "longest_call": longest_call}
        [own, *other], _ = compare(Case(CASES[0].shape, "float32", kind), both, **how)
        assert (own["implementation"], own["status"]) == ("chunkwise", "measured")
        json.dumps([own, *other], allow_nan=False)  # they can be written
        return other[0] if other else None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    for module in (timing, comparison):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


@pytest.mark.parametrize(
    ("made_so", "status", "message"),
    [
        ({"factor": 1 + 1e-5, "kind": "forward+backward"}, "measured", None),
        ({"factor": 1.01}, "failed", "wrong: its output differs by 0.01"),
        ({"factor": math.nan}, "failed", "wrong: its output differs by nan"),
        ({"error": RuntimeError("no\nkernel")}, "failed", "RuntimeError: no kernel"),
        ({"error": Refusal("unavailable", "not installed")}, "unavailable", "not installed"),
        ({"longest_call": 1.2}, "left out", "a call takes 1.5 s, over 1.2 s"),
    ],
)
def test_an_absent_implementation_has_a_status_and_a_reason(made_so, status, message, machine) -> None:
    row = machine.peer(**made_so)
    assert (row["status"], row.get("message")) == (status, message)
    if status == "measured":
        assert row["difference"] == pytest.approx(1e-5, rel=0.1) and machine.hosts == [1.0] * 4
        assert row["seconds"] == {"rounds": 2, "min": 1.0, "lower": 1.0, "median": 1.0, "upper": 1.0}
        assert (row["first call"], row["second call"]) == (1.5, 1.0)
    assert machine.peer(error=Refusal()) is None


def test_a_budget_names_the_cases_that_it_cuts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "Budget", lambda seconds: timing.Budget(seconds, now=lambda: machine.now))
    monkeypatch.setattr(comparison, "measure_rates", lambda *_: RATES)
    monkeypatch.setattr(comparison, "all_implementations", lambda *_: [machine.implementation("chunkwise")])
    options = Namespace(budget=5.0, device="cpu", quick=True, rounds=4, out=None, rules=())
    record = measure_all("kernels", CASES, options, 100.0, settings=1)
    assert [row["shape"] for row in record["rows"]] == ["shape 0"] and record["settings"] == 1
    missed = [f"shape {i}, float32, forward: not measured" for i in (1, 2)]
    assert record["cut"] == ["shape 0, float32, forward: 3 rounds of 4", *missed]


@pytest.mark.parametrize(("allowed", "rounds", "made"), [(math.inf, 20, 20), (50.0, 20, 10), (0.0, 20, 3), (0.0, 2, 2)])
def test_turns_are_cut_to_the_allowed_seconds_but_not_below_three(allowed: float, rounds: int, made: int) -> None:
    order: list[str] = []
    warm = {"a": (1.0, 0.0), "b": (0.5, 0.0), "c": (3.0, 0.0)}
    calls = {name: lambda name=name: order.append(name) or warm[name][0] for name in warm}
    clock = Mock(seconds=lambda call, repeats, host: sum(call() for _ in range(repeats)) / repeats)
    clock.repeats = lambda seconds: 2 if seconds < 1 else 1
    seconds, rounds_made = time_in_turns(calls, warm, clock, rounds, allowed)
    assert order == ["a", "b", "b", "c"] * made and rounds_made == made
    assert all((seconds[x]["median"], seconds[x]["rounds"]) == (warm[x][0], made) for x in warm)


class SimulatedGpu:
    """torch.cuda where launches take the host's time, kernels the device's, and these come in the order of launches."""

    def __init__(self) -> None:
        self.cuda, self.uint8, self.empty = self, None, lambda size, dtype, device: self
        self.host = self.device = 0.0  # the time at which each has done its earlier work
        self.flushes = 0

    def launch(self, seconds: float) -> None:
        self.host += 10e-6
        self.device = max(self.host, self.device) + seconds

    def zero_(self) -> None:
        self.flushes += 1
        self.launch(65e-6)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def Event(self, enable_timing: bool) -> Any:
        def record() -> None:
            self.host += 1e-6
            event.time = max(self.host, self.device)

        event = Mock(synchronize=self.synchronize, record=record)
        event.elapsed_time = lambda end: (end.time - event.time) * 1e3
        return event


# Launches are timed too if no lead is long enough.
GPU_CALLS = [(1, 2e-6, 1), (14, 2e-6, 5), (300, 2e-6, 64), (1000, 1e-5, 1)]


@pytest.mark.parametrize(("launches", "each", "flushes"), GPU_CALLS)
def test_a_short_call_on_a_gpu_is_timed_without_its_launches(launches, each, flushes, monkeypatch) -> None:
    gpu = SimulatedGpu()
    monkeypatch.setattr(timing, "torch", gpu)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.host)
    call = lambda: [gpu.launch(2e-6) for _ in range(launches)]  # noqa: E731
    warm, host = first_calls(call, gpu.synchronize)[1:]
    assert host == pytest.approx(launches * 10e-6)  # without the wait
    clock = CudaClock()
    gpu.flushes = 0
    measured, _ = time_in_turns({"call": call}, {"call": (warm, host)}, clock, 3)
    assert measured["call"]["min"] == pytest.approx(launches * each, rel=0.01) == measured["call"]["upper"]
    assert gpu.flushes == 3 * flushes


def test_waiting_is_no_cpu_time() -> None:
    wait = partial(time.sleep, 0.2)
    assert Clock().seconds(wait, 1) >= 0.1 > ProcessorClock().seconds(wait, 1)


TOKENS, ENTRIES = 2 * 3 * 5, 4 * 7
BOTH = "forward+backward"


@pytest.mark.parametrize(
    ("time", "rule", "kind", "numbers", "operations"),
    [
        # The inputs again, the output's gradient, and a gradient for each input.
        (5, "sum", BOTH, TOKENS * (3 * (4 + 4 + 7) + 2 * 7), TOKENS * ENTRIES * 14),
        (5, "decay", BOTH, TOKENS * (3 * (4 + 4 + 7 + 4 + 7) + 2 * 7), TOKENS * ENTRIES * 23),
        (5, "kimi_delta", BOTH, TOKENS * (3 * (4 + 4 + 7 + 1 + 4) + 2 * 7), TOKENS * ENTRIES * 27),
        # The pairs below the diagonal, of scores and of values.
        (5, "softmax", "forward", TOKENS * 4 * 7, 2 * 3 * (1 + 2 + 3 + 4 + 5) * (2 * 7 + 2 * 7)),
        (1, "sum", "step", 2 * 3 * (4 + 4 + 7 + 7 + 2 * ENTRIES), 2 * 3 * ENTRIES * 4),
    ],
)
def test_every_tensor_is_moved_once(time: int, rule: str, kind: str, numbers: int, operations: int) -> None:
    shape = Shape("tiny", 2, 3, time, 4, 7, 2)
    inputs = draw_inputs(shape, torch.float32, "cpu")
    slow, fast = {str(numbers): 1.0, str(13 * numbers): 4.0}, {"9": 1e9}
    for copies, binding, seconds in ((slow, "bandwidth", numbers), (fast, "arithmetic", operations / 1e3)):
        limit = limit_of(shape, rule, "float32", kind, inputs, {"copy": copies, "matmul": {"float32": 1e3}})
        assert limit == {"bytes": 4 * numbers, "operations": operations, "seconds": seconds, "binding": binding}


@pytest.mark.parametrize("time", [5, 1])
@pytest.mark.parametrize("rule", RULES)
def test_our_backends_get_all_gates_and_the_state(rule: str, time: int) -> None:
    inputs = draw_inputs(shape := Shape("tiny", 2, 3, time, 4, 6, 2), torch.float32, "cpu")
    work = all_implementations([rule], "cpu")[0].prepare(shape, inputs)
    arguments = (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])
    expected, _ = RULES[rule](*arguments, initial_state=inputs.state, backend="reference")
    torch.testing.assert_close(work.as_reference(work.run_forward()), expected, rtol=1e-5, atol=1e-5)
    assert len(work.inputs) == 3 + len(RULES[rule].gates)
    if not shape.steps:
        assert [g.shape for g in work.run_both()] == [x.shape for x in work.inputs]
        assert all(x.is_contiguous() for x in (*work.inputs, work.d_out))


def test_the_peak_of_a_call_counts_what_lives_at_the_same_time() -> None:
    megabytes = partial(torch.empty, dtype=torch.uint8)

    def prepare() -> list[torch.Tensor]:
        megabytes(50 << 20)  # gone before the call
        return [megabytes(4 << 20)]

    def call(state: list[torch.Tensor]) -> torch.Tensor:
        megabytes(1 << 20)
        second, third = megabytes(1 << 20), megabytes(2 << 20)  # with the state, 7 in all
        del second
        state[0] = megabytes(1 << 20)  # in place of 4, once it is there
        return third

    assert peak(prepare, call, "cpu") == 7 << 20
    assert held({"a": [torch.zeros(3), None], "b": {"y": torch.zeros(2, dtype=torch.float64)}}) == 28


# Trainings on a GPU: model, implementation, thousand tokens/s, GB, percent of busy time.
TRAINED = """softmax/plugin/500/16/50 delta/plugin/800/12/90 delta/plugin,_compiled/1250/15/80 delta/stock/250/12/30
softmax/plain_PyTorch/1000/12/90 sum/plugin/1100/13/100"""
# Calls: rule, shape, dtype, implementation, milliseconds, those of the limit, percent of extra memory.
CALLED = """delta/lm-small/bfloat16/native/1/.7/30 delta/lm-small/float32/native/3/.7/30
delta/retnet/bfloat16/native/1/.7/30 delta/lm-small/bfloat16/fla_chunk/2/1/1 delta/lm-small/bfloat16/fla_steps/.9/1/1
softmax/lm-small/bfloat16/SDPA/4/1/1"""
# The verdicts, which mental arithmetic can check.
SAID = """0.9 x (delta, lm-small), missed; 70% (delta, lm-small); median of 2: 70%, met; 3.00 x (delta, lm-small),
missed; 30% (delta, lm-small), missed; 30% (delta, retnet), met; 2.00 ms (delta, forward+backward), met;
1,250,000 tokens/s (delta), met; 5.00 x (delta), met; 2.20 x (sum); median of 2: 2.35 x, missed; 1.25 x (delta), met;
0.88 x (sum); median of 2: 0.94 x, met; 50% (softmax); median of 3: 80%, missed; 15.0 GB (delta), missed;
13.0 GB (sum), met; 16.0 GB (softmax), met"""
LEAST, MOST = ("at least", 1.5), ("at most", 2.0)


def test_targets_on_a_gpu_get_verdicts_worked_out_by_hand() -> None:
    rows = {"kernels": [], "training": []}
    for rule, shape, dtype, name, *numbers in (x.replace("_", " ").split("/") for x in CALLED.split()):
        ms, limit, extra = map(float, numbers)
        row = {"rule": rule, "shape": shape, "dtype": dtype, "implementation": name, "pass": "forward+backward"}
        row |= {"status": "measured", "first call": 0.012, "second call": 0.01, "seconds": {"median": ms / 1e3}}
        row |= {"limit": {"seconds": limit / 1e3, "binding": "bandwidth"}, "memory": {"extra": extra, "tensors": 100}}
        rows["kernels"].append(row)
    for model, name, *numbers in (x.replace("_", " ").split("/") for x in TRAINED.split()):
        speed, memory, busy = map(float, numbers)
        row = {"model": model, "implementation": name, "part": "lm-small", "status": "measured", "busy": busy / 100}
        row |= {"tokens per second": {"median": 1e3 * speed}, "seconds": {"median": 24.576 / speed}}
        rows["training"].append(row | {"peak bytes": 1e9 * memory})
    verdicts = targets.evaluate([{"program": x, "device": "cuda", "threads": 1, "rows": rows[x]} for x in rows])
    lines = [f"{x.measured}, {x.verdict.split(':')[0]}" for x in verdicts if x.where == "GPU" and x.measured != "–"]
    assert "; ".join(lines) == SAID.replace("\n", " ")


def test_the_page_says_what_the_results_say(tmp_path: Path, run) -> None:
    """Each number of a row of docs/performance.md stands in the tables of the results that the row links to."""
    page = (report.ROOT / "docs" / "performance.md").read_text()
    found = report.find_records(report.RESULTS)
    pattern = r"^\| \*\*.*?results/(\w+\.json)\).*?, (\d threads?), (\d+) November\) \| (.*) \|$"
    rows = re.findall(pattern, page, flags=re.MULTILINE)
    assert len(rows) == page.count("\n| **") == 10
    for file, threads, day, said in rows:
        results = [(path, record) for path, record in found if path.name == file]
        tables = report.render(results, report.PAGE)
        assert threads in tables and f"2026-11-{day}" in tables
        numbers = re.findall(r"\d[\d,]*\.\d+|\d+(?= ms)|\d+(?= MiB)", said)
        assert numbers and [number for number in numbers if number not in tables] == [], file
    (tmp_path / "other.json").write_text('{"tokens": 3}')
    for folder, message in (("missing", "missing, which is no folder"), (".", ", which holds no results")):
        assert message in run("report", "--results", tmp_path / folder, "--page", tmp_path / "page.md")
    assert not (tmp_path / "page.md").exists()


@pytest.mark.parametrize(
    ("target", "values", "measured", "verdict"),
    [
        (LEAST, [3.0, 1.0], "1.00 x (b); median of 2: 2.00 x", "missed: by a factor of 1.50; reached by 1 of 2"),
        (MOST, [2.0, 1.0], "2.00 x (a); median of 2: 1.50 x", "met"),
        (LEAST, ["no", "none", "no"], "–", "unmeasured: no; none"),
        (LEAST, [3.0, *["no"] * 4], "3.00 x (a)", "met: unmeasured: b, c, d and 1 more (no)"),
        (LEAST, [], "–", "unmeasured: there are no results"),
        # A failed peer has not been beaten.
        (LEAST, [3.0, Failure("boom"), "no"], "3.00 x (a)", "missed: failed: b (boom); unmeasured: c (no)"),
        (MOST, [Failure("boom")], "–", "missed: failed: a (boom)"),
    ],
)
def test_a_target_is_judged_by_its_worst_case(target: Any, values: Any, measured: str, verdict: str) -> None:
    assert judge(*target, ratio, list(zip("abcde", values, strict=False))) == [measured, verdict]
