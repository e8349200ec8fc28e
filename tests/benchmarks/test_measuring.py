"""Of a budget that ends early, cases without who compiles come first, and what is left goes to whole comparisons."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import comparison, measuring, records, timing
from harness.cases import Inputs, Shape
from harness.contestants import Contestant, Unavailable, Work, leaf
from harness.measuring import Case, measure_all

CALL, COMPILE = 1.0, 60.0
CASES = [Case(Shape(f"shape {i}", 1, 1, 4, 2, 2, 1, "a test"), "float32", "forward") for i in range(3)]


class Machine:
    """Its time passes in calls alone: a second in each, and a minute where one compiles."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def contestant(self, name: str, compiles: bool = False) -> Contestant:
        compiled: set[str] = set()

        def prepare(shape: Shape, inputs: Inputs) -> Work:
            v = leaf(inputs.v)

            def forward() -> torch.Tensor:
                first = not any(call == name for call in self.calls)
                self.calls.append(name)
                self.now += CALL + (COMPILE if compiles and shape.name not in compiled else 0.5 * first)
                compiled.add(shape.name)
                return v

            return Work(forward, [v], inputs.d_out)

        return Contestant(name, "sum", prepare, compiles=compiles)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    clock = SimpleNamespace(perf_counter=lambda: machine.now)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(comparison, "time", clock)
    monkeypatch.setattr(measuring, "Budget", lambda seconds: timing.Budget(seconds, now=lambda: machine.now))
    rates = {"copy": {"4096": 1e9}, "matmul": {"float32": 1e9}}
    monkeypatch.setattr(measuring, "measure_rates", lambda *_: rates)
    return machine


def measure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, *others: Contestant, budget: float | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record, and those that were written on the way."""
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(records, "write", lambda record, path: written.append(record))
    options = Namespace(budget=budget, device="cpu", quick=True, rounds=4, out=Path("record.json"))
    record = measure_all(CASES, [machine.contestant("chunkwise"), *others], options, 100.0, lambda **facts: facts)
    assert written[-1] == record
    return record, written


def told(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Case, contestant, and whether it was measured or why not."""
    return [(row["shape"], row["implementation"], row.get("message", row["status"])) for row in record["rows"]]


def test_who_compiles_does_not_keep_others_from_being_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, written = measure(machine, monkeypatch, machine.contestant("fla", compiles=True), budget=100.0)
    left_out = comparison.NOT_COMPILED
    assert told(record) == [
        ("shape 0", "chunkwise", "measured"),
        ("shape 0", "fla", "measured"),
        *[
            (f"shape {i}", name, status)
            for i in (1, 2)
            for name, status in (("chunkwise", "measured"), ("fla", left_out))
        ],
    ]
    # What is compared comes from one run, whose rounds were as many for both.
    ours, peer = record["rows"][:2]
    assert ours["seconds"]["rounds"] == peer["seconds"]["rounds"] == 3
    assert record["cut"] == ["shape 0, float32, forward: 3 rounds of 4"]
    assert [len(each["rows"]) for each in written] == [2, 4, 6, 6, 6]
    assert [told(each)[1][2] for each in written] == [left_out] * 3 + ["measured"] * 2


def test_the_first_call_is_that_of_the_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = measure(machine, monkeypatch, machine.contestant("fla", compiles=True), budget=1000.0)
    assert [row["status"] for row in record["rows"]] == ["measured"] * 6 and record["cut"] == []
    ours, peer = record["rows"][:2]
    assert (ours["first call"], ours["second call"]) == (1.5, 1.0)
    assert (peer["first call"], peer["second call"]) == (61.0, 1.0)


def test_without_a_budget_all_are_measured_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    record, written = measure(machine, monkeypatch, machine.contestant("fla", compiles=True), budget=None)
    assert [row["status"] for row in record["rows"]] == ["measured"] * 6
    assert [len(each["rows"]) for each in written] == [2, 4, 6, 6]


def test_where_nobody_can_compile_nothing_is_measured_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(shape: Shape, inputs: Inputs) -> Work:
        raise Unavailable("it is not installed")

    absent = Contestant("fla", "sum", prepare, compiles=True)
    record, written = measure(machine, monkeypatch, absent, budget=100.0)
    assert told(record)[1::2] == [(f"shape {i}", "fla", "it is not installed") for i in range(3)]
    assert len(written) == len(CASES) + 1


def test_cases_that_a_budget_does_not_reach_are_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = measure(machine, monkeypatch, budget=5.0)
    assert [row["shape"] for row in record["rows"]] == ["shape 0"]
    assert record["cut"] == [
        "shape 0, float32, forward: 3 rounds of 4",
        "shape 1, float32, forward: not measured",
        "shape 2, float32, forward: not measured",
    ]
