"""Estimates of what a row takes follow from its model, from what was measured, and from the GPU."""

import pytest
from papers import TABLES, estimate
from papers.estimate import Estimate, Size, Speed, stated
from papers.rows import RowError

from .conftest import ROOT

GPU = {"gigabytes": 10, "terabytes per second": 2.0, "teraflops": {"bf16": 100, "fp32": 10}}
SIZE = Size(words=1000, updates=3600, most=4, batches=None, layers=2, products=10**6, parameters=10**8, kept=10**5)
SPEED = Speed(0.5, 0.25, 4.0, Size(1000, 1, 1, None, 4, 10**6, 1, 1))


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        # 6e9 operations at 50 TFLOP/s, 0.2 GB moved three times; 0.5 s for twice the layers, 0.25 s at twice the speed.
        ("bf16", Estimate(6e9 / 50e12 + 0.6e9 / 2e12, 0.25 + 0.25 * 2, 2.0 + 0.2, 3.6, 1)),
        ("fp32", Estimate(6e9 / 5e12 + 1.2e9 / 2e12, 0.25 + 0.25 * 2 * 2, 1.6 + 0.4, 3.6, 1)),
    ],
)
def test_the_bounds_are_what_was_worked_out_by_hand(precision: str, expected: Estimate) -> None:
    found = estimate.estimate(SIZE, GPU, precision, [SPEED])
    assert vars(found) == pytest.approx(vars(expected))


def test_a_batch_that_is_too_large_is_divided_if_it_may_be() -> None:
    # 2 GB of parameters, 0.2 of numbers that a word keeps: in 2.16 GB half of a batch has room, in 2.05 none.
    for gigabytes, batches in ((2.4, 2), (2.0, 4)):
        found = estimate.estimate(SIZE, GPU | {"gigabytes": gigabytes}, "bf16", [SPEED])
        assert (found.batches, found.most) == (batches, pytest.approx(0.25 * batches + 0.5))
    whole = estimate.estimate(Size(**vars(SIZE) | {"most": 1}), GPU | {"gigabytes": 2.0}, "bf16", [SPEED])
    assert whole.batches == 1
    with pytest.raises(RowError, match="--precision is fp16; this GPU has bf16, fp32"):
        estimate.estimate(SIZE, GPU, "fp16", [SPEED])


def test_a_command_shows_rows_beside_what_their_paper_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(stated(name, row) for name, table in TABLES.items() for row in table.rows)
    words = ["mao-table3", "--rows", "decay-32", "base", "--gpu", "H200"]
    assert estimate.main(words, TABLES) == 0
    header, _, decay, base = capsys.readouterr().out.strip().splitlines()
    assert "hours on one H200, bf16" in header and base.startswith("| `mao-table3`: `base` ")
    assert decay.startswith("| `mao-table3`: `decay-32` ") and "35 hours on an A40" in decay
    assert estimate.main(["mao-table3", "--rows", "decay-99"], TABLES) == 1
    assert "ROW is decay-99; it must be one of base, decay-32" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        estimate.main(["--rows", "decay-32"], TABLES)
    assert "--rows goes with TABLE" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_has_the_estimates_of_all_rows() -> None:
    rows = [(name, row) for name, table in TABLES.items() for row in table.rows]
    assert estimate.report(rows, "H100", "bf16", TABLES) in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
