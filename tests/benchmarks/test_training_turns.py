"""Trainings get ready side by side where there is room, take turns, and what becomes of each is in the record."""

import json
import math
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from harness import training_turns
from harness.timing import Budget
from harness.training_turns import Lost, Trainee, groups
from harness.trainings import FLA, PLUGIN, Training

LOADED, WARM, TURN = {"words": 0}, {"seconds": 2.0}, {"seconds": 2.0, "words": 100, "memory": 5}
PROFILE = {"operators": 9, "kernels": 3, "kernel seconds": 0.05}
GONE = Lost("failed", "gone")


def named(name: str) -> Training:
    return Training("part", name, PLUGIN, (), Path(name), "cpu", "fp32")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Measures trainings of these names with these scripts; returns what happened, the rows and what was cut."""

    def measure(names: str, scripts: dict[str, list[Any]], rounds: int = 3, **how: Any) -> Any:
        happened: list[str] = []

        class Fake(Trainee):
            """Answers from a script: by block, what it says, or why it is lost. None is no answer yet."""

            def __init__(self, training: Training, log: Path) -> None:
                self.name = training.model
                self.answers = [*scripts.get(self.name, [LOADED, WARM, TURN, TURN, TURN | {"memory": 6}, PROFILE])]
                self.tell("starts")

            def answer(self, seconds: float) -> Any:
                profiled = happened[-1] == f"{self.name} profile 1"
                answer = self.answers.pop(-1 if profiled else 0) if len(self.answers) > 1 else self.answers[0]
                if isinstance(answer, Lost):
                    raise answer
                if answer and answer.keys() == {"seconds"}:
                    self.tell("is warm")
                return answer

            def tell(self, *what: object) -> None:
                happened.append(" ".join(map(str, (self.name, *what))))

            def end(self) -> None:
                self.tell("ends")

        monkeypatch.setattr(training_turns, "Trainee", Fake)
        given, rows = [(named(name), 12) for name in names], []
        how = {"device": "cpu", "budget": Budget(None), "memory": math.inf} | how
        training_turns.measure(given, tmp_path, rounds=rounds, save=rows.append, **how)
        return happened, rows, how["budget"].cut

    return measure


def test_all_start_before_any_is_warm_and_then_they_take_turns(measured: Any) -> None:
    happened, [rows], cut = measured("ab", {})
    # Warm one by one on a CPU. A turn takes about 3 s: of updates of 0.4 s, then 0.25 s.
    starts = ["a starts", "b starts", "a time 5", "a is warm", "b time 5", "b is warm"]
    turns = [f"{name} time {updates}" for updates in (8, 12, 18) for name in "ab"]
    assert happened == [*starts, *turns, "a profile 1", "a ends", "b profile 1", "b ends"]
    assert [row["words per second"]["median"] for row in rows] == [50.0, 50.0] and cut == []
    assert [rows[0][name] for name in ("peak bytes", "operators", "kernels")] == [6, 9, 3]


def test_who_is_lost_has_its_reason_and_the_others_go_on(measured: Any) -> None:
    before = ([], [LOADED], [LOADED, WARM, TURN], [LOADED, WARM, TURN, TURN])
    happened, [rows], _ = measured("abcde", {name: [*x, GONE] for name, x in zip("abcd", before, strict=True)}, 2)
    assert [row["status"] for row in rows] == ["failed"] * 4 + ["measured"]
    assert all(row["message"] == "gone" for row in rows[:4])
    assert sorted(line for line in happened if line.endswith("ends")) == [f"{name} ends" for name in "abcde"]


def test_as_many_compile_at_a_time_as_the_gpu_has_room_for(measured: Any) -> None:
    """And the GPU's time in an update is over that of one without a profiler."""
    slow = [LOADED, None, None, None, {"seconds": 0.5}, TURN | {"seconds": 1.0}, PROFILE]
    happened, [[row, *_], *_], _ = measured("abcd", dict.fromkeys("abcd", slow), 1, device="cuda", memory=60)
    # Half of the memory is for two of 12 GiB.
    at_a_time = list(accumulate({"time 5": 1, "is warm": -1}.get(line[2:], 0) for line in happened))
    assert max(at_a_time) == 2 and at_a_time[-1] == 0
    assert next(groups([(named("a"), 12)] * 30, 24, 99)) == [(named("a"), 12)] * 12
    assert row["seconds"]["median"] == 0.1 and row["busy"] == 0.5 and row["kernels"] == 3


def test_a_budget_that_ends_leaves_out_the_later_groups_and_rounds(measured: Any, monkeypatch) -> None:
    monkeypatch.setattr(training_turns, "FEWEST_PROCESSES", 2)
    monkeypatch.setattr(training_turns.os, "cpu_count", lambda: 1)
    now = iter([0.0, 1.0, *[99.0] * 99])
    happened, [rows], cut = measured("abc", {}, budget=Budget(10, lambda: next(now)))
    assert [row["model"] for row in rows] == ["a", "b"] and "c starts" not in happened
    assert cut == [*(f"part, {name}, plugin: 1 rounds of 3" for name in "ab"), "part, c, plugin: not measured"]


@pytest.mark.slow
def test_trainings_are_processes_whose_results_are_recorded(tmp_path: Path, monkeypatch, run, capsys) -> None:
    monkeypatch.setattr(training_turns, "TURN_SECONDS", {"cpu": 0.1})
    options = ["--parts", "lm-small", "--models", "delta", "--implementations", PLUGIN, FLA, "--rounds", 1]
    assert run("training", "--quick", *options, "--out", tmp_path / "out.json") == ""
    own, other = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert own["status"] == "measured" and own["words per second"]["median"] > 0 and own["operators"] > 20
    assert (other["status"], other["message"]) == ("unavailable", "ModuleNotFoundError: No module named 'fla'")
    page = capsys.readouterr().out
    assert re.search(r"^\| delta +\| plugin ", page, re.MULTILINE) and "fla, unavailable: Module" in page
