from __future__ import annotations

from pathlib import Path

import pytest
from harness import records


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = records.describe_run("kernels", "cpu", cut=[], rows=[{"a": 1.5}, {"a": None}], rates={"copy": {"4": 1.0}})
    path = tmp_path / "folder" / "record.json"
    records.write(record, path)
    assert records.read(path) == record
    assert '\n  {"a": 1.5},\n' in path.read_text()  # a line for each row
    assert {"program", "device", "date", "machine", "threads", "versions"} <= set(record)


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    records.write({"rows": [1]}, path)
    with pytest.raises(ValueError):
        records.write({"rows": [float("nan")]}, path)
    path_is_a_folder = tmp_path / "folder"
    path_is_a_folder.mkdir()
    with pytest.raises(OSError):
        records.write({"rows": [2]}, path_is_a_folder)
    assert records.read(path) == {"rows": [1]}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "record.json"]


def test_a_record_of_another_method_is_not_current() -> None:
    for program in ("kernels", "generation"):
        record = records.describe_run(program, "cpu")
        assert records.is_current(record)
        assert not records.is_current(record | {"method": record["method"] + 1})
    # What was written before there were methods is of the first.
    assert records.is_current({"program": "training"}) and not records.is_current({"program": "generation"})
