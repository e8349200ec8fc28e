"""Trainings survive what may happen to them: the short form of the table in docs/reliability.md."""

import re

import faults
import pytest

from tests.conftest import import_plugin


@pytest.mark.slow
def test_trainings_survive_every_fault(capsys, tmp_path, monkeypatch):
    import_plugin()
    monkeypatch.setattr(faults.tempfile, "tempdir", str(tmp_path))  # where the folder is, if none is given
    assert faults.main(["--count", "1"]) == 0
    rows = re.findall(r"^\| (.+) \| 1 \| 1 \| (\d+) \|$", capsys.readouterr().out, re.MULTILINE)
    assert [title for title, _ in rows] == [fault.title for fault in faults.FAULTS.values()]
    assert all(int(lost) <= faults.INTERVAL for _, lost in rows)


def test_trainings_that_differ_are_told_apart():
    one = {"a": [faults.torch.ones(2)], "b": 1}
    assert not faults.differences(one, {"a": [faults.torch.ones(2)], "b": 1})
    for other in ({"a": [faults.torch.ones(2)], "b": 1.0}, {"a": [faults.torch.ones(2).double()], "b": 1}, {"a": []}):
        assert len(faults.differences(one, other)) == 1
