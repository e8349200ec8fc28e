"""Figures are drawn from a record alone, and from the same record the same."""

from __future__ import annotations

from pathlib import Path

from harness import figures


def seconds(median: float) -> dict[str, float]:
    return {"rounds": 3, "min": median, "lower": median, "median": median, "upper": 2 * median}


def test_the_next_token(tmp_path: Path) -> None:
    record = {
        "parameters": {"transformer": 10, "delta": 10},
        "rows": [
            {"model": model, "length": length, "seconds": seconds(length), "peak bytes": length}
            for model in ("transformer", "delta")
            for length in (1, 100)
        ],
    }
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    figures.draw_next_token(record, first)
    figures.draw_next_token(record, second)
    assert first.read_bytes() == second.read_bytes() and first.read_bytes().startswith(b"\x89PNG")
    record["rows"][0]["seconds"] = seconds(50)
    figures.draw_next_token(record, second)
    assert first.read_bytes() != second.read_bytes()


def test_training_length_leaves_out_who_was_not_measured(tmp_path: Path) -> None:
    row = {"implementation": "chunkwise", "rule": "sum", "status": "measured", "seconds": seconds(1.0)}
    rows = [row | {"sizes": {"time": time}} for time in (64, 128)]
    unavailable = {"implementation": "native", "rule": "sum", "status": "unavailable", "sizes": {"time": 64}}
    with_it, without = tmp_path / "with.png", tmp_path / "without.png"
    figures.draw_training_length({"settings": {"tokens": 128}, "rows": [*rows, unavailable]}, with_it)
    figures.draw_training_length({"settings": {"tokens": 128}, "rows": rows}, without)
    assert with_it.read_bytes() == without.read_bytes()
