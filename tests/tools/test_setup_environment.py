"""`make setup` is done, or it begins again: never half of it."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import setup_environment
from setup_environment import SetupError


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In a checkout at `root` the titles of the steps `taken`, which do next to nothing, and that of one to interrupt;
    what builds the kernels, and what waits."""
    build = Mock(return_value=Mock(returncode=0))
    steps = SimpleNamespace(root=tmp_path, taken=[], interrupted="none", build=build, wait=Mock())
    for source in setup_environment.SOURCES:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text(f"# {source}\n")

    def step(title: str, command: list[str], log: Path) -> None:
        steps.taken.append(title)
        log.touch()
        (log.parent / "bin").mkdir(exist_ok=True)
        (log.parent / "bin/python").touch(mode=0o755)
        if title.startswith(steps.interrupted):
            raise KeyboardInterrupt

    monkeypatch.setattr(setup_environment, "ROOT", tmp_path)
    monkeypatch.setattr(setup_environment, "step", step)
    monkeypatch.setattr(setup_environment, "wait_for", steps.wait)
    monkeypatch.setattr(setup_environment.subprocess, "run", steps.build)
    return steps


def made_anew(steps: SimpleNamespace, *arguments: str) -> bool:
    """A run that succeeds makes the environment anew, with nothing left of the one before, or none of it."""
    steps.taken.clear()
    witness = steps.root / ".venv" / "witness"
    witness.touch()
    assert setup_environment.main(list(arguments)) == 0
    assert (len(steps.taken), witness.exists()) in ((6, False), (0, True))
    return bool(steps.taken)


def test_an_environment_is_left_alone_unless_files_or_versions_changed(steps, monkeypatch, capsys) -> None:
    python, sources = steps.root / ".venv/bin/python", setup_environment.SOURCES
    assert setup_environment.main(["--torch", "2.11.0"]) == 0 and len(steps.taken) == 6
    assert not made_anew(steps, "--torch", "2.13.0", "--any-torch")
    assert steps.build.mock_calls == [call([str(python), "tools/native_build.py"], cwd=steps.root)] * 2
    assert made_anew(steps, "--torch", "2.13.0") and "torch 2.13.0" in steps.taken
    for source in (sources[0], "patches/files/fairseq/version.txt", "fairseq_fastweights/integrity.py"):
        (steps.root / source).write_text("# changed\n")
        assert made_anew(steps, "--any-python", "--any-torch"), source
    for title in ("an empty", "a first"):  # one that was interrupted
        (steps.root / sources[0]).write_text(title)
        steps.interrupted = title
        assert setup_environment.main([]) != 0
        steps.interrupted = "none"
        assert made_anew(steps)
    python.unlink()
    assert made_anew(steps, "--any-python", "--any-torch")
    monkeypatch.setattr(setup_environment.platform, "python_version", lambda: "3.12.99")
    assert not made_anew(steps, "--any-python")
    assert made_anew(steps)
    assert str(steps.root / ".venv" / "setup.log") in steps.wait.call_args.args[1]  # of another set-up
    steps.build.return_value.returncode = 1
    assert setup_environment.main([]) == 1 and "FASTWEIGHTS_BUILD" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "name", "value", "says"),
    [
        (None, "sys.version_info", (3, 14, 0), "; 3.10 to 3.13"),
        (None, "importlib.util.find_spec", lambda name: name != "ensurepip" or None, "-venv): install it"),
        ("thesis.tex", "STAMP", "stamp", "is no environment of Python; move it away"),
        ("pyvenv.cfg", "BASE_PYTHON", "gone/python3", "whose Python, gone/python3, is gone"),
        ("pyvenv.cfg", "STAMP", "stamp", "TORCH=newest is no version; it should be like 2.13.0"),
    ],
)
def test_what_will_not_do_is_named_in_one_line_and_removes_nothing(
    steps, there: str | None, name: str, value, says: str, monkeypatch, capsys
) -> None:
    if there is not None:
        (steps.root / ".venv").mkdir()
        (steps.root / ".venv" / there).touch()
    monkeypatch.setattr(f"setup_environment.{name}", value)
    assert setup_environment.main(["--torch", "newest"] if "TORCH" in says else []) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert not steps.taken and [path.name for path in steps.root.glob(".venv/*")] == ([there] if there else [])


def test_a_step_leaves_the_kernels_to_the_end_and_shows_why_it_failed(tmp_path: Path, capsys) -> None:
    log = tmp_path / "setup.log"
    setup_environment.step("this project", ["sh", "-c", "echo builds $FASTWEIGHTS_BUILD"], log)
    assert log.read_text().endswith("\nbuilds none\n")
    with pytest.raises(SetupError, match=r"could not install torch 9\.9; .*setup.log"):
        setup_environment.step("torch 9.9", ["sh", "-c", "echo none found; exit 3"], log)
    assert "none found" in capsys.readouterr().err
