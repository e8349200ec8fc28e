"""`make setup` is done, or it begins again: never half of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import setup_environment
from setup_environment import Environment, SetupError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that holds the files that the environment depends on."""
    for source in setup_environment.SOURCES:
        (tmp_path / source).parent.mkdir(exist_ok=True)
        (tmp_path / source).write_text(f"# {source}\n")
    monkeypatch.setattr(setup_environment, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The titles of the steps `taken`, each no more than the first one's least, of which one may be `interrupted` by an
    error; the commands that build kernels, and how these end."""
    steps = SimpleNamespace(taken=[], interrupted=None, builds=[], status=0)

    def step(environment: Environment, title: str, *rest: object) -> None:
        steps.taken.append(title)
        environment.python.parent.mkdir(exist_ok=True)
        environment.python.touch(mode=0o755)
        (environment.folder / "pyvenv.cfg").touch()
        if steps.interrupted and title.startswith(steps.interrupted[0]):
            raise steps.interrupted[1]

    def run(command: list[str], **options: object) -> SimpleNamespace:
        steps.builds.append(command)
        return SimpleNamespace(returncode=steps.status)

    monkeypatch.setattr(Environment, "step", step)
    monkeypatch.setattr(setup_environment, "subprocess", SimpleNamespace(run=run))
    return steps


def made_anew(root: Path, steps: SimpleNamespace, *arguments: str) -> bool:
    """Whether a run that succeeds makes the environment anew, with nothing left of the one before, or none of it."""
    steps.taken.clear()
    witness = root / ".venv" / "witness"
    witness.touch()
    assert setup_environment.main(list(arguments)) == 0
    assert (len(steps.taken), witness.exists()) in ((6, False), (0, True))
    return bool(steps.taken)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SetupError, SystemExit])
@pytest.mark.parametrize("title", ["an empty", "torch", "a first"])
def test_an_interrupted_setup_begins_again(root: Path, steps, title: str, error: type[BaseException], capsys) -> None:
    steps.interrupted = title, error
    try:
        assert setup_environment.main([]) != 0
    except SystemExit:
        assert error is SystemExit
    steps.interrupted = None
    assert made_anew(root, steps)
    assert "was not finished" in capsys.readouterr().out


def test_an_environment_is_left_alone_but_for_kernels_unless_its_files_or_versions_changed(
    root: Path, steps, monkeypatch, capsys
) -> None:
    assert setup_environment.main(["--torch", "2.11.0"]) == 0 and len(steps.taken) == 6
    capsys.readouterr()
    assert not made_anew(root, steps, "--torch", "2.13.0", "--any-torch")
    assert capsys.readouterr().out.count("\n") == 1
    assert steps.builds == [[str(root / ".venv/bin/python"), "tools/native_build.py"]] * 2
    assert made_anew(root, steps, "--torch", "2.13.0") and "torch 2.13.0" in steps.taken
    for source in setup_environment.SOURCES:
        (root / source).write_text("# changed\n")
        assert made_anew(root, steps, "--any-python", "--any-torch"), source
        assert "of another sources" in capsys.readouterr().out
    (root / ".venv/bin/python").unlink()
    assert made_anew(root, steps, "--any-python", "--any-torch")
    monkeypatch.setattr(setup_environment.platform, "python_version", lambda: "3.12.99")
    assert not made_anew(root, steps, "--any-python")
    assert made_anew(root, steps)
    steps.status = 1
    assert setup_environment.main([]) == 1 and "FASTWEIGHTS_BUILD" in capsys.readouterr().err


def version(*numbers: int) -> tuple[str, object]:
    return "sys.version_info", numbers


def without(module: str) -> tuple[str, object]:
    return "importlib.util.find_spec", lambda name: None if name == module else 1


def refuse(self: Environment) -> None:
    raise PermissionError(13, "Permission denied", str(self.folder))


GONE = [("sys.prefix", "{root}/.venv"), ("sys.base_exec_prefix", "{root}/gone")]


@pytest.mark.parametrize(
    ("there", "changes", "arguments", "says"),
    [
        (None, [version(3, 9, 1)], [], "; 3.10 to 3.13"),
        (None, [version(3, 14, 0)], [], "; 3.10 to 3.13"),
        (None, [version(3, 11, 7), without("venv")], [], "python3.11-venv"),
        (None, [version(3, 12, 1), without("ensurepip")], [], "python3.12-venv"),
        (None, [], ["--torch", "latest"], "TORCH=latest"),
        (None, [("Environment.make", refuse)], [], "{root}/.venv"),  # a checkout that cannot be written
        ("thesis.tex", [], [], "{root}/.venv"),
        ("pyvenv.cfg", GONE, [], "{root}/gone/bin/python3"),
    ],
)
def test_what_will_not_do_is_named_in_one_line_and_removes_nothing(
    root: Path, steps, there: str | None, changes, arguments: list[str], says: str, monkeypatch, capsys
) -> None:
    if there is not None:
        (root / ".venv").mkdir()
        (root / ".venv" / there).touch()
    for name, value in changes:
        monkeypatch.setattr(f"setup_environment.{name}", value.format(root=root) if isinstance(value, str) else value)
    assert setup_environment.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says.format(root=root) in error and error.count("\n") == 1
    assert not steps.taken and [path.name for path in root.glob(".venv/*")] == ([there] if there else [])


def test_a_step_that_fails_shows_its_output_and_a_reason(root: Path, capsys) -> None:
    environment = Environment(root, "9.9")
    environment.folder.mkdir()
    for output, says in (
        ("ERROR: No matching distribution found for torch==9.9", "there is no torch==9.9"),
        ("Could not find a version that satisfies x (from versions: none)", "is there a network?"),
    ):
        log = (environment.folder / "setup.log").open("w")
        with log, pytest.raises(SetupError, match=f"could not install torch 9.9: .*{says}.*setup.log"):
            environment.step("torch 9.9", ["sh", "-c", f"echo '{output}'; exit 3"], log)
        assert output in capsys.readouterr().err
