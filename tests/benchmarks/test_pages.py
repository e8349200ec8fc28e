"""Pages and figures are made from records alone, and the committed page is the one that its records make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import report
from harness import figures, pages
from harness.tables import count, markdown, mebibytes, milliseconds, ratio, significant

from tests.benchmarks.conftest import Run

MEBIBYTE = 1 << 20


def seconds(median: float) -> dict[str, float]:
    return {"median": median, "lower": median, "upper": 2 * median}


def cells(record: dict[str, Any]) -> list[list[str]]:
    page = pages.render({"cut": ["some rounds"], **record})
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]


def test_a_table_is_markdown_with_aligned_columns() -> None:
    assert markdown(["rule", "x"], [["sum", "1.5"], ["a|b", "10"]]) == (
        "| rule |   x |\n| ---- | --: |\n| sum  | 1.5 |\n| a\\|b |  10 |\n"
    )


def test_numbers_have_three_digits_and_a_unit() -> None:
    values = {0.0: "0", 0.01234: "0.0123", 1.0: "1.00", 9.999: "10.00", 12.34: "12.3", 1234.5: "1,234", -12.34: "-12.3"}
    assert {value: significant(value) for value in values} == values
    assert (milliseconds(0.0015), ratio(2), mebibytes(3 << 20)) == ("1.50 ms", "2.00 x", "3.00 MiB")
    assert (count(1, "thread"), count(2000, "thread")) == ("1 thread", "2,000 threads")


def test_the_next_tokens_ratio_is_expected_to_grow_with_the_time_of_the_cache() -> None:
    common = {"first": 1, "last": 2, "state bytes": MEBIBYTE, "peak bytes": 2 * MEBIBYTE}
    rows = [
        {"model": model, "length": length, "seconds": seconds(time), other: {"median": more}, **common}
        for model, length, time, other, more in (
            ("sum", 64, 0.020, "seconds beside other lengths", 0.015),
            ("sum", 1000, 0.010, "seconds beside other lengths", 0.016),
            ("transformer", 64, 0.010, "cache seconds", 0.001),
            ("transformer", 1000, 0.040, "cache seconds", 0.021),
        )
    ]
    table = cells({"program": "generation", "parameters": {"transformer": 1, "sum": 1}, "rows": rows})
    sizes = ["1.00 MiB", "2.00 MiB"]
    assert table[2:] == [
        ["transformer", "64 (1 – 2)", "10.0 (10.0 – 20.0)", "1.00 x", "–", "–", *sizes],
        ["transformer", "1,000 (1 – 2)", "40.0 (40.0 – 80.0)", "1.00 x", "–", "–", *sizes],
        ["sum", "64 (1 – 2)", "20.0 (20.0 – 40.0)", "0.5 x", "0.5 x", "15.0", *sizes],
        ["sum", "1,000 (1 – 2)", "10.0 (10.0 – 20.0)", "4.00 x", "1.50 x", "16.0", *sizes],
        [""],
        ["- cut to keep to the budget: some rounds"],
    ]


def test_translations_are_compared_with_the_transformer_on_the_same_source() -> None:
    sizes = {"state bytes": 8 * MEBIBYTE, "encoder bytes": 16 * MEBIBYTE, "peak bytes": 32 * MEBIBYTE}

    def row(model: str, median: float, source: int = 64) -> dict[str, Any]:
        return {"model": model, "beam": 4, "source": source, "length": source, "seconds": seconds(median), **sizes}

    rows = [row("transformer", 0.6), row("transformer", 0.9, 99), row("elu", 0.3, 99), row("elu", 0.3)]
    whole = [row("transformer", 6.4), row("elu", 3.2)]
    settings = {"hypotheses": 8, "source": 64}
    table = cells({"program": "translation", "settings": settings, "rows": rows, "whole": whole})
    # Bytes of a hypothesis; those with the one source come first.
    shown = ["1.00 MiB", "2.00 MiB", "32.0 MiB"]
    assert table[6:8] == [
        ["elu", "64", "64", "300 (300 – 600)", "2.00 x", *shown],
        ["elu", "99", "99", "300 (300 – 600)", "3.00 x", *shown],
    ]
    assert ["elu", "3.20 (3.20 – 6.40)", "50.0", "2.00 x"] in table


def test_training_speeds_are_over_that_of_softmax() -> None:
    rows = [{"model": model, "words per second": seconds(speed)} for model, speed in (("softmax", 50), ("sum", 120))]
    assert cells({"program": "training", "rows": rows})[2:] == [
        ["softmax", "50.0 (50.0 – 100)", "1.00 x"],
        ["sum", "120 (120 – 240)", "2.40 x"],
    ]


def kernel_row(implementation: str, rule: str, median: float | None, **more: Any) -> dict[str, Any]:
    sizes = {"batch": 2, "heads": 3, "time": 1024, "key_dim": 4, "value_dim": 5}
    row = {"shape": "s", "dtype": "bfloat16", "pass": "forward", "implementation": implementation, "rule": rule}
    if median is None:
        return {**row, "status": "unavailable", "message": "none"}
    limit = {"seconds": 0.001, "binding": "bandwidth"}
    return {**row, "sizes": sizes, "status": "measured", "seconds": seconds(median), "limit": limit, **more}


def test_of_a_peers_functions_the_fastest_counts_and_who_took_no_part_is_named() -> None:
    rows = [kernel_row("native", "sum", None), kernel_row("native", "delta", 0.002), kernel_row("chunkwise", "sum", 0.004)]
    rows += [kernel_row("fla chunk", "delta", 0.003), kernel_row("fla recurrent", "delta", 0.001)]
    rows += [kernel_row("SDPA", "softmax", 0.008)]
    table = cells({"program": "kernels", "rows": rows, "rates": {"copy": {"4194304": 1e9}, "matmul": {"float32": 1e9}}})
    assert table[2][-2:] == ["SDPA", "fla"] and len(table[2]) == 8  # nobody has a column for nothing
    assert table[4][3:] == ["chunkwise", "4.00 (4.00 – 8.00)", "25% of bandwidth", "2.00 x", "–"]
    assert table[5][3:] == ["native", "2.00 (2.00 – 4.00)", "50% of bandwidth", "4.00 x", "0.5 x (recurrent)"]
    assert ["- native, unavailable (sum, s, bfloat16, forward): none"] in table and ["- some rounds"] in table


def test_the_committed_page_is_what_the_results_say_and_an_old_one_is_noticed(tmp_path: Path, run: Run) -> None:
    run("report", "--check")
    page = tmp_path / "page.md"
    for old in (None, "old\n"):
        if old is not None:
            page.write_text(old)
        assert "report.py writes it" in run("report", "--check", "--page", page)
    assert page.read_text() == "old\n"
    run("report", "--page", page)
    assert run("report", "--check", "--page", page) == ""
    for folder, message in (("missing", "missing, which is no folder"), ("empty", "empty, which holds no results")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        (tmp_path / "empty" / "other.json").write_text('{"tokens": 3}')
        assert message in run("report", "--results", tmp_path / folder, "--page", tmp_path / "none.md")
    assert not (tmp_path / "none.md").exists()


def test_results_are_found_within_those_of_a_device_and_by_method(tmp_path: Path) -> None:
    record = {"program": "kernels", "device": "cuda", "date": "2026-01-02"}
    later = {"program": "training", "device": "cuda", "date": "2026-01-01"}
    old = {"program": "generation", "device": "cpu", "date": "2026-01-02T03:04:05", "rows": [{"model": "transformer"}]}
    contents = {"a": {"tests": {"passed": 3}, "end to end": later, "kernels": record}, "b": {**record, "device": "cpu"}}
    for name, content in {**contents, "c": {"tokens": 3}, "old": old}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = report.find_records(tmp_path)
    assert [(path.stem, record["device"], record["program"]) for path, record in found] == [
        *[("b", "cpu", "kernels"), ("a", "cuda", "kernels"), ("old", "cpu", "generation"), ("a", "cuda", "training")]
    ]
    page = report.render(found[2:3], tmp_path / "page.md")
    assert "unmeasured: generation.py was not run as it measures now" in page
    assert "Not measured as generation.py measures now; [what it measured on 2026-01-02](old.json) says" in page


@pytest.mark.parametrize("name", ["next_token", "training_length"])
def test_a_figure_is_drawn_from_who_was_measured_and_is_always_the_same(name: str, tmp_path: Path) -> None:
    record = json.loads((report.RESULTS / f"{name}.json").read_text())
    draw = getattr(figures, f"draw_{name}")
    drawn = []
    for number in range(3):
        if number == 1 and name == "training_length":
            record["rows"].append({"implementation": "x", "rule": "sum", "status": "unavailable", "sizes": {"time": 64}})
        if number == 2:
            record["rows"][0]["seconds"]["median"] *= 2
        draw(record, tmp_path / "figure.png")
        drawn.append((tmp_path / "figure.png").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0].startswith(b"\x89PNG")
