"""Pages and figures are made from records alone, and the committed page is the one that its records make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import targets
from harness.cases import SHAPES
from harness.tables import count, mebibytes, milliseconds, ratio, significant
from harness.targets import judge

from tests.benchmarks.conftest import Run

# Records of round numbers, and the page that they are to make: its numbers can be checked in the head.
MADE_UP = Path(__file__).parent / "made_up"
LEAST, MOST = ("at least", 1.5), ("at most", 2.0)


def test_a_page_says_of_its_records_what_was_worked_out_by_hand(run: Run) -> None:
    assert run("report", "--check", "--results", MADE_UP, "--page", MADE_UP / "page.md") == ""


def test_the_committed_page_is_what_the_results_say_and_an_old_one_is_noticed(tmp_path: Path, run: Run) -> None:
    assert run("report", "--check") == ""
    page = tmp_path / "page.md"
    for old in (None, "old\n"):
        if old is not None:
            page.write_text(old)
        assert "report.py writes it" in run("report", "--check", "--page", page)
    assert page.read_text() == "old\n"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "other.json").write_text('{"tokens": 3}')
    for folder, message in (("missing", "missing, which is no folder"), ("empty", "empty, which holds no results")):
        assert message in run("report", "--results", tmp_path / folder, "--page", page)
    assert page.read_text() == "old\n"
    run("report", "--page", page)
    assert run("report", "--check", "--page", page) == ""


def test_numbers_have_three_digits_and_a_unit() -> None:
    values = {0.0: "0", 0.01234: "0.0123", 1.0: "1.00", 9.999: "10.00", 12.34: "12.3", 1234.5: "1,234", -12.34: "-12.3"}
    assert {value: significant(value) for value in values} == values
    assert (milliseconds(0.0015), ratio(2), mebibytes(3 << 20)) == ("1.50 ms", "2.00 x", "3.00 MiB")
    assert (count(1, "thread"), count(2000, "thread")) == ("1 thread", "2,000 threads")


@pytest.mark.parametrize(
    ("target", "values", "measured", "verdict"),
    [
        (LEAST, [1.5], "1.50 x (a)", "met"),
        (LEAST, [3.0, 1.6, 2.0], "1.60 x (b); median of 3: 2.00 x", "met"),
        (LEAST, [3.0, 1.0], "1.00 x (b); median of 2: 2.00 x", "missed: by a factor of 1.50; reached by 1 of 2"),
        (MOST, [2.0, 1.0], "2.00 x (a); median of 2: 1.50 x", "met"),
        (MOST, [3.0], "3.00 x (a)", "missed: by a factor of 1.50"),
        (LEAST, ["no", 1.0], "1.00 x (b)", "missed: by a factor of 1.50; unmeasured: a (no)"),
        (LEAST, ["no", "none", "no"], "–", "unmeasured: no; none"),
        (LEAST, [3.0, *["no"] * 4], "3.00 x (a)", "met: unmeasured: b, c, d and 1 more (no)"),
        (LEAST, [], "–", "unmeasured: there are no results"),
    ],
)
def test_the_worst_of_what_was_measured_counts(
    target: tuple[str, float], values: list[Any], measured: str, verdict: str
) -> None:
    assert judge(*target, ratio, list(zip("abcde", values, strict=False))) == [measured, verdict]


def test_all_targets_are_listed_whatever_was_measured() -> None:
    verdicts = targets.evaluate([])
    assert len(verdicts) == 17 and all(verdict.verdict.startswith("unmeasured: ") for verdict in verdicts)
    on_gpu = targets.GOALS[3]["cases"]["shape"]
    assert set(on_gpu) == {name for name, shape in SHAPES.items() if not shape.steps} - {"attention"}
    assert verdicts[15].verdict == "unmeasured: kernels.py was not run on a GPU"
    assert targets.render(targets.evaluate_one({"program": "training", "device": "cpu"})) == ""
