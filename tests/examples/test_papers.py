"""Estimates of what a row takes, and docs/papers.md, which tells what was verified of each row."""

import re

import pytest
from papers import TABLES, estimate, overview
from papers.estimate import Estimate, Size, Speed, stated
from papers.rows import RowError

from .conftest import ROOT
from .test_reproduce_rows import SCORED, SHARED

GPU = {"gigabytes": 10, "terabytes per second": 2.0, "teraflops": {"bf16": 100, "fp32": 10}}
SIZE = Size(words=1000, updates=3600, most=4, batches=None, layers=2, products=10**6, parameters=10**8, kept=10**5)
SPEED = Speed(0.5, 0.25, 4.0, Size(1000, 1, 1, None, 4, 10**6, 1, 1))


def test_the_bounds_are_what_was_worked_out_by_hand() -> None:
    # 6e9 operations at 50 TFLOP/s, 0.2 GB moved three times; 0.5 s for twice the layers, 0.25 s at twice the speed.
    half = Estimate(6e9 / 50e12 + 0.6e9 / 2e12, 0.25 + 0.25 * 2, 2.0 + 0.2, 3.6, 1)
    single = Estimate(6e9 / 5e12 + 1.2e9 / 2e12, 0.25 + 0.25 * 2 * 2, 1.6 + 0.4, 3.6, 1)
    for precision, expected in (("bf16", half), ("fp32", single)):
        assert vars(estimate.estimate(SIZE, GPU, precision, [SPEED])) == pytest.approx(vars(expected))
    # 2 GB of parameters, 0.2 of numbers that a word keeps: in 2.16 GB half of a batch has room, in 1.8 none.
    for most, gigabytes, batches in ((4, 2.4, 2), (4, 2.0, 4), (1, 2.0, 1)):
        size = Size(**vars(SIZE) | {"most": most})
        found = estimate.estimate(size, GPU | {"gigabytes": gigabytes}, "bf16", [SPEED])
        assert (found.batches, found.most) == (batches, pytest.approx(0.25 * batches + 0.5))
    with pytest.raises(RowError, match="--precision is fp16; this GPU has bf16, fp32"):
        estimate.estimate(SIZE, GPU, "fp16", [SPEED])


def test_a_command_shows_rows_beside_what_their_paper_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(stated(name, row) for name, table in TABLES.items() for row in table.rows)
    assert estimate.main(["mao-table3", "--rows", "decay-32", "base", "--gpu", "H200"], TABLES) == 0
    header, _, decay, base = capsys.readouterr().out.strip().splitlines()
    assert "hours on one H200, bf16" in header and base.startswith("| `mao-table3`: `base` ")
    assert decay.startswith("| `mao-table3`: `decay-32` ") and "35 hours on an A40" in decay
    assert estimate.main(["mao-table3", "--rows", "decay-99"], TABLES) == 1
    assert "ROW is decay-99; it must be one of base, decay-32" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_of_gpus_has_the_estimates_of_all_rows() -> None:
    rows = [(name, row) for name, table in TABLES.items() for row in table.rows]
    assert estimate.report(rows, "H100", "bf16", TABLES) in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_the_page_of_papers_is_what_its_generator_makes_and_true_of_tests() -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert overview.page() == page, "run python tools/papers_page.py"
    assert all(f"`{name} {row}`" in page for name, table in TABLES.items() for row in table.rows)
    tested = {" ".join(name.split()[:2]): count for name, count in SCORED.items() if name.split()[0] in TABLES}
    tested |= {"mao-table2 gpt2": 0} | {f"schlag-table4 {row}": 1 for row in SHARED}
    told = re.findall(r"^.*`((?:schlag|mao|choi)-table\d [\w-]+)`(.*)$", page, flags=re.MULTILINE)
    assert {name for name, rest in told if "trained" in re.sub("trained as", "", rest)} == tested.keys()
    assert {name for name, rest in told if "scored" in rest} == {name for name, count in tested.items() if count}
    words = {word for section in overview.sections() for line in section.lines for word in line.verified.split(", ")}
    assert words == {*overview.WORDS, "as the row", ""}
