from __future__ import annotations

import pytest
from harness.tables import count, markdown, mebibytes, milliseconds, ratio, significant


def test_a_table_is_markdown_with_aligned_columns() -> None:
    assert markdown(["rule", "x"], [["sum", "1.5"], ["a|b", "10"]]) == (
        "| rule |   x |\n| ---- | --: |\n| sum  | 1.5 |\n| a\\|b |  10 |\n"
    )


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells"):
        markdown(["a", "b"], [["1"]])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (9.999, "10.00"), (12.34, "12.3"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_numbers_have_their_units() -> None:
    assert (milliseconds(0.0015), ratio(2), mebibytes(3 << 20)) == ("1.50 ms", "2.00 x", "3.00 MiB")
    assert (count(1, "thread"), count(2000, "thread")) == ("1 thread", "2,000 threads")
