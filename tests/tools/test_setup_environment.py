"""`make setup` is done, or it begins again: never half of it."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import setup_environment
from setup_environment import SetupError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that holds the files that the environment depends on."""
    for source in setup_environment.SOURCES:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text(f"# {source}\n")
    monkeypatch.setattr(setup_environment, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The titles of the steps `taken`, which do next to nothing, and the one that is `interrupted` by an error; what
    builds the kernels."""
    steps = SimpleNamespace(taken=[], interrupted=None, build=Mock(return_value=Mock(returncode=0)))

    def step(title: str, command: list[str], log: Path) -> None:
        steps.taken.append(title)
        log.touch()
        (log.parent / "bin").mkdir(exist_ok=True)
        (log.parent / "bin/python").touch(mode=0o755)
        if steps.interrupted and title.startswith(steps.interrupted[0]):
            raise steps.interrupted[1]

    monkeypatch.setattr(setup_environment, "step", step)
    monkeypatch.setattr(setup_environment.subprocess, "run", steps.build)
    return steps


def made_anew(root: Path, steps: SimpleNamespace, *arguments: str) -> bool:
    """A run that succeeds makes the environment anew, with nothing left of the one before, or none of it."""
    steps.taken.clear()
    witness = root / ".venv" / "witness"
    witness.touch()
    assert setup_environment.main(list(arguments)) == 0
    assert (len(steps.taken), witness.exists()) in ((6, False), (0, True))
    return bool(steps.taken)


def test_an_environment_is_left_alone_unless_files_or_versions_changed(root: Path, steps, monkeypatch, capsys) -> None:
    assert setup_environment.main(["--torch", "2.11.0"]) == 0 and len(steps.taken) == 6
    assert not made_anew(root, steps, "--torch", "2.13.0", "--any-torch")
    assert steps.build.mock_calls == [call([str(root / ".venv/bin/python"), "tools/native_build.py"], cwd=root)] * 2
    assert made_anew(root, steps, "--torch", "2.13.0") and "torch 2.13.0" in steps.taken
    assert {"patches/files/fairseq/version.txt", "fairseq_fastweights/integrity.py"} <= set(setup_environment.SOURCES)
    for source in setup_environment.SOURCES:
        (root / source).write_text("# changed\n")
        assert made_anew(root, steps, "--any-python", "--any-torch"), source
    for title in ("an empty", "a first"):  # one that was interrupted
        (root / setup_environment.SOURCES[0]).write_text(title)
        steps.interrupted = title, KeyboardInterrupt
        assert setup_environment.main([]) != 0
        steps.interrupted = None
        assert made_anew(root, steps)
    (root / ".venv/bin/python").unlink()
    assert made_anew(root, steps, "--any-python", "--any-torch")
    monkeypatch.setattr(setup_environment.platform, "python_version", lambda: "3.12.99")
    assert not made_anew(root, steps, "--any-python")
    assert made_anew(root, steps)
    steps.build.return_value.returncode = 1
    assert setup_environment.main([]) == 1 and "FASTWEIGHTS_BUILD" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "name", "value", "says"),
    [
        (None, "sys.version_info", (3, 14, 0), "; 3.10 to 3.13"),
        (None, "importlib.util.find_spec", lambda name: name != "ensurepip" or None, "-venv): install it"),
        ("thesis.tex", "STAMP", "stamp", "is no environment of Python; move it away"),
        ("pyvenv.cfg", "BASE_PYTHON", "gone/python3", "whose Python, gone/python3, is gone"),
        ("pyvenv.cfg", "TORCH", "newest", "TORCH=newest is no version; it should be like 2.13.0"),
    ],
)
def test_what_will_not_do_is_named_in_one_line_and_removes_nothing(
    root: Path, steps, there: str | None, name: str, value, says: str, monkeypatch, capsys
) -> None:
    if there is not None:
        (root / ".venv").mkdir()
        (root / ".venv" / there).touch()
    if name != "TORCH":
        monkeypatch.setattr(f"setup_environment.{name}", value)
    assert setup_environment.main(["--torch", value] if name == "TORCH" else []) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert not steps.taken and [path.name for path in root.glob(".venv/*")] == ([there] if there else [])


def test_a_second_set_up_waits_and_steps_leave_the_kernels_to_the_end(root, steps, monkeypatch, capsys) -> None:
    waits, run = Mock(), Mock(return_value=Mock(returncode=0))
    monkeypatch.setattr(setup_environment, "wait_for", waits)
    assert setup_environment.main([]) == 0
    assert str(root / ".venv" / "setup.log") in waits.call_args.args[1]
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(setup_environment.subprocess, "run", run)
        setup_environment.step("this project", ["pip"], root / "setup.log")
    assert run.call_args.kwargs["env"]["FASTWEIGHTS_BUILD"] == "none"
    with pytest.raises(SetupError, match=r"could not install torch 9\.9; .*setup.log"):
        setup_environment.step("torch 9.9", ["sh", "-c", "echo none found; exit 3"], root / "setup.log")
    assert "none found" in capsys.readouterr().err
