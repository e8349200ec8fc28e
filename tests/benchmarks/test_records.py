"""Records are written whole or not at all, and of another method are not current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import records


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = records.describe_run("kernels", "cpu", cut=[], rows=[{"a": 1.5}, {"a": None}], rates={"copy": {"4": 1.0}})
    path = tmp_path / "folder" / "record.json"
    records.write(record, path)
    assert json.loads(path.read_text()) == record
    assert '\n  {"a": 1.5},\n' in path.read_text()  # a line for each row
    assert {"program", "device", "date", "machine", "threads", "versions"} <= set(record)


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path, folder = tmp_path / "record.json", tmp_path / "folder"
    folder.mkdir()
    records.write({"rows": [1]}, path)
    with pytest.raises(ValueError, match="Out of range float"):
        records.write({"rows": [float("nan")]}, path)
    with pytest.raises(IsADirectoryError):
        records.write({"rows": [2]}, folder)
    assert json.loads(path.read_text()) == {"rows": [1]} and sorted(tmp_path.iterdir()) == [folder, path]
