"""Pages and figures are made from records alone, and the committed page is the one that its records make."""

import re
from pathlib import Path
from typing import Any

import pytest
import report
from harness import records, targets
from harness.pages import ratio
from harness.targets import Failure, judge

# Records of a GPU, in round numbers, and what is to be said of the targets: it can be checked in the head.
MADE_UP = Path(__file__).parent / "made_up"
TRAINED = "plugin, compiled | 1,250,000 (1,250,000 – 2,500,000) | 1.25 x | 15.0 GB | 80% | 930 | 1,000 | 1 |"
LEAST, MOST = ("at least", 1.5), ("at most", 2.0)


def test_of_a_gpu_a_page_says_what_was_worked_out_by_hand() -> None:
    results = report.find_records(MADE_UP)
    verdicts = targets.evaluate([record for _, record in results if records.is_current(record)])
    lines = [" | ".join(verdict[2:]) for verdict in verdicts if verdict.where == "GPU"]
    assert lines == (MADE_UP / "gpu.txt").read_text().splitlines()
    page = re.sub(" +", " ", report.render(results, MADE_UP / "page.md"))
    missed = "Not measured as generation measures now; [what it measured on 2026-01-02](gpu.json) says something else."
    cut = "- cut to keep to the budget: baevski, decay-32, plugin: not measured"
    for line in (f"| delta | {TRAINED}", "- delta, plain PyTorch, fla, unavailable: no fla", missed, cut):
        assert line in page.splitlines()


def test_the_committed_page_is_what_the_results_say(tmp_path: Path, run) -> None:
    page = report.PAGE.with_name("nothing to read.md")
    assert report.render(report.find_records(report.RESULTS), page) == report.PAGE.read_text()
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
        # Who fails has not been beaten.
        (LEAST, [3.0, Failure("boom"), "no"], "3.00 x (a)", "missed: failed: b (boom); unmeasured: c (no)"),
        (MOST, [Failure("boom")], "–", "missed: failed: a (boom)"),
    ],
)
def test_the_worst_of_what_was_measured_counts(target: Any, values: Any, measured: str, verdict: str) -> None:
    assert judge(*target, ratio, list(zip("abcde", values, strict=False))) == [measured, verdict]
