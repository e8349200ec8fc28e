"""tools/recorded_passes.py: what is run, what is left out, and what is recorded."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import recorded_passes
from native_toolchain import HostCompiler, Unavailable
from recorded_passes import Check

WORDS = "import pathlib, sys; pathlib.Path('ran').touch(); sys.exit(int(pathlib.Path('status').read_text()))"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two checks, of which the first ends with what the file `status` says."""
    files = {"cuda/step.cu": "a", "cuda/choice.cu": "a", "cuda/part/old.h": "a", "tests/x": "", "status": "0"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    checks = {"emulated": Check(("cuda/*.cu", "cuda/**/*.h"), ("-c", WORDS)), "other": Check(("status",), ("-c", ""))}
    monkeypatch.setattr(recorded_passes, "CHECKS", checks)
    monkeypatch.setattr(HostCompiler, "find", lambda: None)
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


def ran(root: Path, *arguments: str, status: int = 0) -> bool:
    assert recorded_passes.main([*arguments, "emulated"], root) == status
    found = (root / "ran").exists()
    (root / "ran").unlink(missing_ok=True)
    return found


def test_a_check_is_left_out_while_its_files_are_those_that_passed(root: Path, capsys) -> None:
    recorded_passes.main(["other"], root)
    assert ran(root, "--changed") and not ran(root, "--changed")
    assert "emulated: left out" in capsys.readouterr().out
    assert ran(root), "it was asked for"
    step, other = root / "cuda/step.cu", root / "cuda/stop.cu"
    for change in (lambda: step.write_text("b\n"), lambda: step.rename(other), other.unlink):
        change()
        assert ran(root, "--changed") and not ran(root, "--changed")
    record = root / recorded_passes.RECORD
    assert sorted(json.loads(record.read_text())) == ["emulated", "other"]
    for text in ("{", "[]", '{"another": ""}'):
        record.write_text(text)
        assert not ran(root, "--changed", status=1)
        assert "tests/recorded_passes.json is damaged" in capsys.readouterr().err
    (root / "cuda/part/old.h").unlink()
    assert not ran(root, status=1)
    assert "no file is called cuda/**/*.h any more" in capsys.readouterr().err


def test_a_failure_and_what_cannot_be_run_are_not_recorded(root: Path, monkeypatch) -> None:
    (root / "status").write_text("5")
    assert ran(root, status=5) and ran(root, "--changed", status=5)
    (root / "status").write_text(str(recorded_passes.NOT_RUN))
    assert ran(root, status=0)
    monkeypatch.setenv("CI", "true")
    assert ran(root, status=1)
    monkeypatch.setattr(HostCompiler, "find", Mock(side_effect=Unavailable("no compiler")))
    assert not ran(root, status=1) and not (root / recorded_passes.RECORD).exists()
