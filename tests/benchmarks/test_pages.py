"""Pages and figures are made from records alone, and the committed page is the one that its records make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import report
from harness import records, targets
from harness.cases import SHAPES
from harness.pages import ratio
from harness.targets import judge

from tests.benchmarks.conftest import Run

# Records of a GPU, which the committed page has none of, in round numbers, and what is to be said of them: the targets
# and the sections. It can be checked in the head.
MADE_UP = Path(__file__).parent / "made_up"
LEAST, MOST = ("at least", 1.5), ("at most", 2.0)


def test_of_a_gpu_a_page_says_what_was_worked_out_by_hand() -> None:
    results = report.find_records(MADE_UP)
    verdicts = targets.evaluate([record for _, record in results if records.is_current(record)])
    goals = "".join(f"{' | '.join(verdict[2:])}\n" for verdict in verdicts if verdict.where == "GPU")
    _, heading, sections = report.render(results, MADE_UP / "gpu.md").partition("## The rules, GPU")
    assert f"{goals}\n{heading}{sections}" == (MADE_UP / "gpu.md").read_text()


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


@pytest.mark.parametrize(
    ("target", "values", "measured", "verdict"),
    [
        (LEAST, [3.0, 1.6, 2.0], "1.60 x (b); median of 3: 2.00 x", "met"),
        (LEAST, [3.0, 1.0], "1.00 x (b); median of 2: 2.00 x", "missed: by a factor of 1.50; reached by 1 of 2"),
        (MOST, [2.0, 1.0], "2.00 x (a); median of 2: 1.50 x", "met"),
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
