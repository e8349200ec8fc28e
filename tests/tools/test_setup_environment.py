"""`make setup` is done, or it begins again: never half of it."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import setup_environment

Step = Callable[..., None]

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of its own, for `make setup` as a person types it."""
    for name in ("Makefile", *setup_environment.SOURCES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make_setup(checkout: Path, *variables: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Without what a make that runs the tests hands down."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "PYTHON", "TORCH")}
    environment |= {"PATH": path + os.environ["PATH"], "PIP_NO_INDEX": "1"}
    return subprocess.run(
        ["make", "setup", *variables], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--symlinks", "--copies"])
def test_an_environment_that_is_activated_can_be_made_anew(checkout: Path, how: str) -> None:
    """Its own Python starts the set-up, and is removed with it; the set-up ends at a torch that is nowhere."""
    folder = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", how, folder], check=True)
    (folder / "witness").touch()
    result = make_setup(checkout, "TORCH=0.0.0", path=f"{folder / 'bin'}:")
    assert "was not finished" in result.stdout and not (folder / "witness").exists()
    assert "could not install torch" in result.stderr and "Traceback" not in result.stderr
    assert (folder / "bin" / "pip").exists()


def test_a_python_whose_base_is_gone_is_named_and_removes_nothing(
    root: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (root / ".venv").mkdir()
    (root / ".venv" / "pyvenv.cfg").touch()
    monkeypatch.setattr(setup_environment.sys, "prefix", str(root / ".venv"))
    monkeypatch.setattr(setup_environment.sys, "base_exec_prefix", str(root / "gone"))
    assert setup_environment.main([]) == 1
    assert str(root / "gone" / "bin" / "python3") in capsys.readouterr().err
    assert not steps and (root / ".venv" / "pyvenv.cfg").exists()


def test_an_empty_torch_is_named(checkout: Path) -> None:
    result = make_setup(checkout, "TORCH=", f"PYTHON={sys.executable}")
    assert "error: TORCH= is no version; it should be like 2.13.0" in result.stderr.splitlines()
    assert not (checkout / ".venv").exists()


def test_a_checkout_that_cannot_be_written_ends_it_with_one_line(
    root: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def refuse(self: setup_environment.Environment) -> None:
        raise PermissionError(13, "Permission denied", str(self.folder))

    monkeypatch.setattr(setup_environment.Environment, "make", refuse)
    assert setup_environment.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and str(root / ".venv") in error and error.count("\n") == 1


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
    with (
        (environment.folder / "setup.log").open("w") as log,
        pytest.raises(setup_environment.SetupError, match=says) as error,
    ):
        environment.step("torch 9.9", command, log)
    assert "setup.log" in str(error.value)
    assert output in capsys.readouterr().err
