"""`make setup` is done, or it begins again: never half of it."""

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import setup_environment

Step = Callable[..., None]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that holds the files that the environment depends on."""
    for source in setup_environment.SOURCES:
        (tmp_path / source).parent.mkdir(exist_ok=True)
        (tmp_path / source).write_text(f"# {source}\n")
    monkeypatch.setattr(setup_environment, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that were taken; each does no more than the first one's least."""
    taken: list[str] = []

    def step(self: setup_environment.Environment, title: str, *rest: object) -> None:
        taken.append(title)
        self.python.parent.mkdir(exist_ok=True)
        self.python.touch(mode=0o755)
        (self.folder / "pyvenv.cfg").touch()

    monkeypatch.setattr(setup_environment.Environment, "step", step)
    monkeypatch.setattr(setup_environment.Environment, "build_kernels", lambda self: None)
    return taken


def interrupting(step: Step, title: str, error: type[BaseException]) -> Step:
    """`step`, until it comes to one whose title begins with `title`."""

    def interrupted(self: setup_environment.Environment, *arguments: object) -> None:
        step(self, *arguments)
        if str(arguments[0]).startswith(title):
            raise error

    return interrupted


def test_a_finished_environment_is_left_alone(root: Path, steps: list[str], capsys) -> None:
    assert setup_environment.main([]) == 0
    assert len(steps) == 6
    steps.clear()
    (root / ".venv" / "witness").touch()
    capsys.readouterr()
    assert setup_environment.main([]) == 0
    assert not steps and (root / ".venv" / "witness").exists()
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("status", [0, 1])
def test_every_run_builds_what_changed_of_the_kernels(
    root: Path, steps: list[str], finished: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if finished:
        setup_environment.main([])
    monkeypatch.undo()
    monkeypatch.setattr(setup_environment, "ROOT", root)
    monkeypatch.setattr(setup_environment.Environment, "make", lambda self: self.folder.mkdir())
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(setup_environment.subprocess, "run", run)
    assert setup_environment.main([]) == status
    assert commands == [[str(root / ".venv/bin/python"), "tools/native_build.py"]]
    assert ("FASTWEIGHTS_BUILD" in capsys.readouterr().err) == bool(status)


@pytest.mark.parametrize("error", [KeyboardInterrupt, setup_environment.SetupError, SystemExit])
@pytest.mark.parametrize("title", ["an empty", "torch", "the packages", "fairseq", "a first"])
def test_an_interrupted_setup_begins_again(
    root: Path,
    steps: list[str],
    title: str,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    whole = setup_environment.Environment.step
    monkeypatch.setattr(setup_environment.Environment, "step", interrupting(whole, title, error))
    try:
        assert setup_environment.main([]) != 0
    except SystemExit:
        assert error is SystemExit
    (root / ".venv" / "witness").touch()

    monkeypatch.setattr(setup_environment.Environment, "step", whole)
    steps.clear()
    assert setup_environment.main([]) == 0
    assert "was not finished" in capsys.readouterr().out
    assert len(steps) == 6 and not (root / ".venv" / "witness").exists()


@pytest.mark.parametrize("source", setup_environment.SOURCES)
def test_an_environment_made_from_other_files_is_made_anew(root: Path, steps: list[str], source: str, capsys) -> None:
    setup_environment.main([])
    steps.clear()
    (root / source).write_text("# changed\n")
    assert setup_environment.main(["--any-python", "--any-torch"]) == 0
    assert "of another sources" in capsys.readouterr().out
    assert len(steps) == 6


def test_versions_that_were_asked_for_matter_and_defaults_do_not(
    root: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_environment.main(["--torch", "2.11.0"])
    steps.clear()
    setup_environment.main(["--torch", "2.13.0", "--any-torch"])
    assert not steps
    setup_environment.main(["--torch", "2.13.0"])
    assert "torch 2.13.0" in steps
    steps.clear()
    monkeypatch.setattr(setup_environment.platform, "python_version", lambda: "3.12.99")
    setup_environment.main(["--any-python"])
    assert not steps
    setup_environment.main([])
    assert steps


def test_an_environment_that_lost_its_python_is_made_anew(root: Path, steps: list[str]) -> None:
    setup_environment.main([])
    steps.clear()
    (root / ".venv/bin/python").unlink()
    assert setup_environment.main([]) == 0
    assert len(steps) == 6


def test_a_folder_that_is_no_environment_is_not_removed(root: Path, steps: list[str], capsys) -> None:
    (root / ".venv").mkdir()
    (root / ".venv" / "thesis.tex").touch()
    assert setup_environment.main([]) == 1
    assert str(root / ".venv") in capsys.readouterr().err
    assert (root / ".venv" / "thesis.tex").exists() and not steps


def test_of_two_setups_at_a_time_one_makes_and_one_waits(
    root: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = setup_environment.Environment.step

    def slow(self: setup_environment.Environment, *arguments: object) -> None:
        time.sleep(0.02)
        at_once(self, *arguments)

    monkeypatch.setattr(setup_environment.Environment, "step", slow)
    threads = [threading.Thread(target=setup_environment.main, args=([],)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(steps) == 6


@pytest.mark.parametrize(
    ("version", "missing", "says"),
    [
        ((3, 9, 1), None, "Python 3.10 to 3.13"),
        ((3, 14, 0), None, "Python 3.10 to 3.13"),
        ((3, 11, 7), "venv", "python3.11-venv"),
        ((3, 12, 1), "ensurepip", "python3.12-venv"),
    ],
)
def test_a_python_that_will_not_do_is_named(
    root: Path,
    steps: list[str],
    version: tuple[int, ...],
    missing: str | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    monkeypatch.setattr(setup_environment.sys, "version_info", version)
    monkeypatch.setattr(setup_environment.importlib.util, "find_spec", lambda name: None if name == missing else 1)
    assert setup_environment.main([]) == 1
    assert says in capsys.readouterr().err
    assert not steps and not (root / ".venv").exists()


def test_a_torch_that_is_no_version_is_named(root: Path, steps: list[str], capsys) -> None:
    assert setup_environment.main(["--torch", "latest"]) == 1
    assert "TORCH=latest" in capsys.readouterr().err
    assert not steps


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("ERROR: No matching distribution found for torch==9.9", "there is no torch==9.9"),
        ("Could not find a version that satisfies x (from versions: none)", "is there a network?"),
    ],
)
def test_a_step_that_fails_shows_its_output_and_a_reason(root: Path, output: str, says: str, capsys) -> None:
    environment = setup_environment.Environment(root, "9.9")
    environment.folder.mkdir()
    command = ["sh", "-c", f"echo '{output}'; exit 3"]
    with (environment.folder / "setup.log").open("w") as log:
        with pytest.raises(setup_environment.SetupError, match=says) as error:
            environment.step("torch 9.9", command, log)
    assert "setup.log" in str(error.value)
    assert output in capsys.readouterr().err
