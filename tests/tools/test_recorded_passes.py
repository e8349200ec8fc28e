"""The record of passes: what counts as a change, and what is run and written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recorded_passes
from recorded_passes import CHECKS, RECORD, ROOT, Check, main

PASS = ("-c", "open('ran', 'a').write('x')")
FAIL = ("-c", "raise SystemExit(3)")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one file, on which both checks depend, and which passes."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "kernel.h").write_bytes(b"one\r\n")
    monkeypatch.setattr(recorded_passes, "CHECKS", {name: Check(PASS, ("*.h",)) for name in CHECKS})
    return tmp_path


def runs(root: Path) -> int:
    ran = root / "ran"
    return len(ran.read_text()) if ran.exists() else 0


def test_a_pass_on_record_is_left_out_until_a_file_changes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--record", *CHECKS], root) == 0 and runs(root) == 2
    capsys.readouterr()
    assert main([], root) == 0 and runs(root) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: left out, since its files are those of the last pass; `make test-{name}` runs it" for name in CHECKS
    ]
    (root / "kernel.h").write_bytes(b"two\n")
    assert main([], root) == 0 and runs(root) == 4
    assert main([], root) == 0 and runs(root) == 6, "recorded without --record"


def test_a_check_that_is_named_always_runs_and_alone_is_recorded(root: Path) -> None:
    for count in (1, 2):
        assert main(["--record", "emulated"], root) == 0 and runs(root) == count
    assert list(json.loads((root / RECORD).read_text())) == ["emulated"]
    assert not list(root.glob("tests/*.part"))


@pytest.mark.parametrize("change", ["content", "line endings", "name", "another", "borders"])
def test_what_changes_a_digest(root: Path, change: str) -> None:
    check = Check(PASS, ("*.h",))
    (root / "more.h").write_bytes(b"more")
    before = check.digest(root)
    (root / "kernel.h").touch()
    assert check.digest(root) == before
    match change:
        case "content":
            (root / "kernel.h").write_bytes(b"two\r\n")
        case "line endings":
            (root / "kernel.h").write_bytes(b"one\n")
        case "name":
            (root / "kernel.h").rename(root / "kernels.h")
        case "another":
            (root / "new.h").write_bytes(b"")
        case "borders":  # the same bytes, dealt out to the files in another way
            (root / "kernel.h").write_bytes(b"one")
            (root / "more.h").write_bytes(b"\r\nmore")
    assert check.digest(root) != before


@pytest.mark.parametrize("command", [FAIL, ("-c", "open('kernel.h', 'a').write('x')")], ids=["fails", "changes a file"])
def test_a_failed_check_is_not_recorded(root: Path, command: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--record", "emulated"], root) == 0
    before = (root / RECORD).read_bytes()
    (root / "kernel.h").write_bytes(b"two")
    monkeypatch.setitem(recorded_passes.CHECKS, "emulated", Check(command, ("*.h",)))
    assert main(["--record", "emulated"], root) == (3 if command == FAIL else 1)
    assert (root / RECORD).read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must have a SHA-256 digest for each of emulated, sanitized"),
        ('{"emulated": "abc"}', "must have a SHA-256 digest"),
        ('{"other": "' + "0" * 64 + '"}', "must have a SHA-256 digest"),
    ],
)
def test_a_damaged_record_is_an_error_that_says_so(
    root: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / RECORD).write_text(text)
    assert main([], root) == 2 and runs(root) == 0
    error = capsys.readouterr().err
    assert str(RECORD) in error and message in error and "take it from git again, or remove it" in error


def test_a_pattern_without_files_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "kernel.h").unlink()
    assert main([], root) == 2 and "no file is called *.h any more" in capsys.readouterr().err


def test_an_unknown_check_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["emulate"], root)
    assert "there is no check called emulate" in capsys.readouterr().err


def test_the_projects_own_record_is_readable_and_its_files_are_there() -> None:
    assert recorded_passes.recorded(ROOT).keys() <= CHECKS.keys()
    digests = {check.digest(ROOT) for check in CHECKS.values()}
    assert len(digests) == len(CHECKS)
    for check in CHECKS.values():
        assert check.command[0] == "-m" or (ROOT / check.command[0]).is_file()
