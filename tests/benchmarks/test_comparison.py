"""A comparison notes who cannot take part, who fails and who is wrong; of a budget that ends early, cases without who
compiles come first, and what is left goes to whole comparisons."""

import json
import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import comparison, records, timing
from harness.cases import Inputs, Shape
from harness.comparison import NOT_COMPILED, Case, compare, measure_all
from harness.contestants import Contestant, Refusal, Work, leaf
from harness.timing import Call, Clock

CASES = [Case(Shape(f"shape {i}", 1, 2, 4, 2, 2), "float32", "forward") for i in range(3)]
RATES = {"copy": {"4096": 1e9}, "matmul": {"float32": 1e9}}


class Machine(Clock):
    """Its time passes in calls alone: a second in each, half a second more in the first, and a minute to compile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self.hosts: list[float] = []  # what the clock was told

    def seconds(self, call: Call, repeats: int, host: float = 0.0) -> float:
        self.hosts.append(host)
        return super().seconds(call, repeats)

    def contestant(self, name: str, factor: float = 1.0, error: Any = None, compiles: bool = False) -> Contestant:
        """Its output is v times a factor, or an error: a refusal if it is not even prepared."""
        compiled: set[str] = set()

        def prepare(shape: Shape, inputs: Inputs) -> Work:
            if isinstance(error, Refusal):
                raise error
            v = leaf(inputs.v)

            def forward() -> torch.Tensor:
                self.now += 1.0 + (60.0 if compiles and shape.name not in compiled else 0.5 * (name not in self.calls))
                self.calls.append(name)
                compiled.add(shape.name)
                if error is not None:
                    raise error
                return factor * v

            return Work(forward, [v], inputs.d_out)

        return Contestant(name, "sum", prepare, compiles=compiles)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    clock = SimpleNamespace(perf_counter=lambda: machine.now)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(comparison, "time", clock)
    monkeypatch.setattr(comparison, "Budget", lambda seconds: timing.Budget(seconds, now=lambda: machine.now))
    monkeypatch.setattr(comparison, "measure_rates", lambda *_: RATES)
    return machine


def rows_of(machine: Machine, other: Contestant, kind: str = "forward", **limits: float) -> dict[str, Any]:
    machine.calls.append("chunkwise")  # whose first call was before
    both = [machine.contestant("chunkwise"), other]
    case = Case(CASES[0].shape, "float32", kind)
    rows, _ = compare(case, both, device="cpu", clock=machine, rates=RATES, rounds=2, **limits)
    assert rows[0]["implementation"] == "chunkwise" and rows[0]["status"] == "measured"
    json.dumps(rows, allow_nan=False)  # they can be written
    return {row["implementation"]: row for row in rows}


@pytest.mark.parametrize("kind", ["forward", "forward+backward"])
def test_who_agrees_is_measured(machine: Machine, kind: str) -> None:
    row = rows_of(machine, machine.contestant("peer", factor=1 + 1e-5), kind=kind)["peer"]
    assert row["status"] == "measured" and row["difference"] == pytest.approx(1e-5, rel=0.1)
    assert row["seconds"] == {"rounds": 2, "min": 1.0, "lower": 1.0, "median": 1.0, "upper": 1.0}
    assert row["sizes"] == {"batch": 1, "heads": 2, "time": 4, "key_dim": 2, "value_dim": 2}
    assert machine.hosts == [1.0] * 4 and set(row["limit"]) == {"bytes", "operations", "seconds", "binding"}


@pytest.mark.parametrize(
    ("made_so", "limits", "status", "message"),
    [
        ({"factor": 1.01}, {}, "failed", "wrong: its output differs by 0.01"),
        ({"factor": math.nan}, {}, "failed", "wrong: its output differs by nan"),
        ({"error": RuntimeError("no\nkernel")}, {}, "failed", "RuntimeError: no kernel"),
        ({"error": Refusal("unavailable", "not installed")}, {}, "unavailable", "not installed"),
        ({}, {"longest_call": 1.2}, "left out", "a call takes 1.5 s, over 1.2 s"),
        ({"compiles": True}, {"compiling": 0.0}, "left out", NOT_COMPILED),
    ],
)
def test_who_takes_no_part_says_why_unless_it_does_not_belong(
    made_so: dict[str, Any], limits: dict[str, float], status: str, message: str, machine: Machine
) -> None:
    row = rows_of(machine, machine.contestant("peer", **made_so), **limits)["peer"]
    assert (row["status"], row["message"]) == (status, message)
    assert list(rows_of(machine, machine.contestant("peer", error=Refusal()))) == ["chunkwise"]


def test_what_a_budget_does_not_reach_is_named_and_who_compiles_keeps_nobody_from_being_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(records, "write", lambda record, path: written.append(record))
    options = Namespace(budget=5.0, device="cpu", quick=True, rounds=4, out=Path("record.json"), rules=())
    both = [machine.contestant("chunkwise")]
    monkeypatch.setattr(comparison, "all_contestants", lambda *_: both)
    record = measure_all("kernels", CASES, options, 100.0)
    assert [row["shape"] for row in record["rows"]] == ["shape 0"]
    missed = [f"shape {i}, float32, forward: not measured" for i in (1, 2)]
    assert record["cut"] == ["shape 0, float32, forward: 3 rounds of 4", *missed]

    written.clear()
    machine.calls.clear()
    options.budget = 100.0
    both.append(machine.contestant("fla", compiles=True))
    record = measure_all("kernels", CASES, options, 100.0)
    assert written[-1]["rows"] == record["rows"]
    assert [row["shape"] for row in record["rows"]] == [f"shape {i}" for i in (0, 0, 1, 1, 2, 2)]
    assert [row["status"] for row in record["rows"][::2]] == ["measured"] * 3
    # What is compared comes from one run, whose rounds were as many for both.
    ours, peer = record["rows"][:2]
    assert ours["seconds"]["rounds"] == peer["seconds"]["rounds"] == 3
    assert record["cut"] == ["shape 0, float32, forward: 3 rounds of 4"]
    told = [[row.get("message", "measured") for row in x["rows"] if row["implementation"] == "fla"] for x in written]
    assert told[:-1] == [*([NOT_COMPILED] * number for number in (1, 2, 3)), ["measured", NOT_COMPILED, NOT_COMPILED]]
