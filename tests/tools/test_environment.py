"""fairseq is built from the source that the patches are for; `make setup` is done, or it begins again."""

import functools
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import build_fairseq
import edit_patches
import fairseq
import fairseq_patches
import pytest
import setup_environment
from fairseq_patches import FILES, SHARED, VERSION, BuildError, apply_patches, git, in_order
from setup_environment import SetupError

INSTALLED = Path(fairseq.__file__).parents[1]
PATCHES = in_order()[1:]
"""Without that of setup.py, which is not installed."""


@pytest.fixture
def source(our_fairseq: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the release that are patched: those of the fairseq that is installed, with all patches undone."""
    monkeypatch.setattr(fairseq_patches, "in_order", lambda: PATCHES)
    root = tmp_path / "fairseq-0.12.2"
    for name in {name for patch in PATCHES for name in re.findall(r"^\+\+\+ b/(.*)", patch.read_text(), re.M)}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / name, root / name)
    for patch in reversed(PATCHES):
        git("apply", "--reverse", str(patch), folder=root, doing=f"find {patch.name}")
    return root


def test_the_fairseq_that_is_installed_is_the_release_with_the_patches(source: Path, monkeypatch) -> None:
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    names |= {path.relative_to(FILES).as_posix() for path in FILES.rglob("*.*") if path.suffix != ".pyc"}
    # A repository around the source and git's variables change nothing.
    git("init", folder=source.parent, doing="make a repository")
    monkeypatch.setenv("GIT_DIR", f"{source.parent}/.git")
    apply_patches(source)
    # A wheel has the version in a module.
    for name in names - {"pyproject.toml", "fairseq/version.txt"} | {f"fairseq/{Path(name).name}" for name in SHARED}:
        assert (source / name).read_bytes() == (INSTALLED / name).read_bytes(), name
    assert fairseq.__version__ == VERSION
    with pytest.raises(BuildError, match=rf"^cannot apply {PATCHES[0].name} to the source of .*: fairseq"):
        apply_patches(source)


def test_calls_that_would_run_code_are_replaced() -> None:
    loads = "torch.load(f)\ntorch.load(\n    f,\n)\ntorch.load(f, weights_only=False)\n"
    unsafe = f"# Head.\nimport torch\nx = eval(y) + model.eval()\n{loads}os.system(x)\n"
    unsafe += "yaml.load(f, Loader=yaml.FullLoader)\n"
    safe = fairseq_patches.with_safe_calls(unsafe)
    names = ("read_yaml", "run_without_shell", "literal")
    imports = "".join(f"from fairseq.settings import {name}\n" for name in names) + "import torch\n"
    loads = loads.replace("(f)", "(f, weights_only=True)").replace("f,\n)", "f,\n weights_only=True)")
    calls = f"x = literal(y) + model.eval()\n{loads}run_without_shell(x)\nread_yaml(f)\n"
    assert safe == f"# Head.\n{imports}{calls}" == fairseq_patches.with_safe_calls(safe)


A, B, NEW = "ImportError: a", "ImportError: b", "download install"
# The installed version, its failure, the new one's failure, options, pip's calls, the version left, and the message.
INSTALLATIONS = [
    (None, None, None, "", NEW, VERSION, f"fairseq {VERSION} is installed\n"),
    # One that works is left alone.
    (VERSION, None, None, "", "", VERSION, "left as it is"),
    ("1.0.0a0", None, None, "", "", "1.0.0a0", "left as it is"),
    ("0.10.2", None, None, "", "", "0.10.2", "error: fairseq 0.10.2 is installed, and 0.12"),
    ("0.10.2", None, None, "--force", NEW, VERSION, ""),
    # A broken one is replaced; a new one that is broken is removed again.
    (VERSION, A, None, "", NEW, VERSION, f"({A}); replacing"),
    ("0.12.2", A, B, "", f"{NEW} uninstall", None, f"error: .*{B}; .* now: None\n"),
    (None, None, None, "--constraint no/such", "", None, "error: --constraint no/such: there is no"),
    (None, None, None, "", "", None, "error: git is not installed, and is needed to apply the patches; fairseq"),
]


@pytest.mark.parametrize("case", INSTALLATIONS)
def test_fairseq_is_installed_where_needed_and_its_state_is_printed(case: tuple, tmp_path, capsys, monkeypatch) -> None:
    version, before, after, arguments, calls, left, says = case
    environment, patched, made = {"version": version, "failure": before}, Mock(), []
    (tmp_path / "fairseq-0.12.2").mkdir()

    def pip(what: str, *arguments: str, doing: str, **pinned: str) -> None:
        made.append(what)
        if what == "download":
            folder = Path(arguments[arguments.index("--dest") + 1])
            with tarfile.open(folder / "fairseq-0.12.2.tar.gz", "w:gz") as file:
                file.add(tmp_path / "fairseq-0.12.2", "fairseq-0.12.2")
            pins = Path(pinned["PIP_BUILD_CONSTRAINT"]).read_text()
            assert re.fullmatch(r"setuptools==[\d.]+\ncython==[\d.]+\nnumpy==[\d.]+", pins)
        elif what == "install":
            patched.assert_called_once_with(Path(arguments[-1]))
        environment.update(version=VERSION if what == "install" else None, failure=after)

    found = {"installed_version": lambda: environment["version"], "import_failure": lambda: environment["failure"]}
    for name, stand_in in ({"pip": pip, "apply_patches": patched} | found).items():
        monkeypatch.setattr(build_fairseq, name, stand_in)
    if "git" in says:
        monkeypatch.setenv("PATH", "")
    status = build_fairseq.main(arguments.split())
    printed = capsys.readouterr()
    assert re.search(re.sub(r"[()+]", r"\\\g<0>", says), "".join(printed)), printed
    assert status == says.startswith("error") == bool(printed.err)
    assert made == calls.split() and environment["version"] == left


def test_patches_are_edited_as_commits(source: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    patches, commits = tmp_path / "patches", tmp_path / "commits"
    patches.mkdir()
    for number, patch in enumerate(PATCHES[:3], start=1):
        shutil.copy(patch, patches / f"{number:04d}{patch.name[4:]}")
    monkeypatch.setattr(fairseq_patches, "in_order", in_order)
    monkeypatch.setattr(fairseq_patches, "PATCHES", patches)
    monkeypatch.setattr(edit_patches, "download", lambda folder: source)
    before = {patch.name: patch.read_bytes() for patch in in_order()}

    def edit(what: str, says: str = "") -> set[str]:
        """Opens or saves; the names of the patches that are not as they were."""
        assert edit_patches.main([what, str(commits)]) == says.startswith("error")
        assert re.search(says, "".join(capsys.readouterr()))
        return {name for name, _ in before.items() ^ {patch.name: patch.read_bytes() for patch in in_order()}.items()}

    assert not edit("save", r"error: .*/commits is no repository; FOLDER must be one that `open` made\n")
    assert not edit("open") and not edit("open", r"error: .*/commits exists; FOLDER must be a new one\n")
    (commits / "new.py").write_text("changed\n")
    assert not edit("save", "error: .*: 1 changed files are not committed, among them new.py")
    edit_patches._commit(commits, "Setup: no more\n\nIts reason.")
    assert edit("save") == {name := f"{len(before) + 1:04d}-setup-no-more.patch"}
    assert (patches / name).read_text().startswith("Setup: no more\n\nIts reason.\n\n--- /dev/null\n")


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In a checkout at `root` the titles of the steps `taken`, which do next to nothing; the title to be `interrupted`;
    mocks of the kernels' build and of the wait for another set-up."""
    build = Mock(return_value=Mock(returncode=0))
    steps = SimpleNamespace(root=tmp_path, taken=[], interrupted="none", build=build, wait=Mock())
    for source in map(tmp_path.joinpath, setup_environment.SOURCES):
        source.parent.mkdir(parents=True, exist_ok=True)
        source.touch()

    def step(title: str, command: list[str], log: Path) -> None:
        steps.taken.append(title)
        log.touch()
        (log.parent / "bin").mkdir(exist_ok=True)
        (log.parent / "bin/python").touch(mode=0o755)
        if title.startswith(steps.interrupted):
            raise KeyboardInterrupt

    for name, stand_in in {"ROOT": tmp_path, "step": step, "wait_for": steps.wait, "subprocess.run": build}.items():
        monkeypatch.setattr(f"setup_environment.{name}", stand_in)
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
    for source in (sources[0], "patches/files/fairseq/version.txt", "fairseq_fastweights/files/integrity.py"):
        (steps.root / source).write_text("# changed\n")
        assert made_anew(steps, "--any-python", "--any-torch"), source
    for steps.interrupted in ("an empty", "a first"):
        (steps.root / sources[0]).write_text(steps.interrupted)
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


# A file in .venv, an attribute and its value, the arguments, and the message.
UNUSABLE = [
    ("pyvenv.cfg", "sys.version_info", (3, 14, 0), "", "; 3.10 to 3.13"),
    ("pyvenv.cfg", "importlib.util.find_spec", lambda name: name != "ensurepip" or None, "", "-venv): install it"),
    ("thesis.tex", "STAMP", "stamp", "", "is no environment of Python; move it away"),
    ("pyvenv.cfg", "BASE_PYTHON", "gone/python3", "", "whose Python, gone/python3, is gone"),
    ("pyvenv.cfg", "STAMP", "stamp", "--torch newest", "TORCH=newest is no version; it should be like 2.13.0"),
    ("pyvenv.cfg", "STAMP", "stamp", "--torch 2.5.0", "TORCH=2.5.0 is too old; it must be 2.6 or later"),
    ("pyvenv.cfg", "STAMP", "stamp", "--torch 2.9.1 --oldest 2.10", "TORCH=2.9.1 is too old; it must be 2.10 or"),
    ("pyvenv.cfg", "STAMP", "stamp", "--data /nonexistent", "DATA: /nonexistent is not a folder"),
    ("pyvenv.cfg", "STAMP", "stamp", "--data /dev", "DATA: /dev has no text for train"),
]


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_input_is_named_in_one_line_and_removes_nothing(case, steps, monkeypatch, capsys) -> None:
    there, name, value, typed, says = case
    (steps.root / ".venv").mkdir()
    (steps.root / ".venv" / there).touch()
    monkeypatch.setattr(f"setup_environment.{name}", value)
    assert setup_environment.main(typed.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert not steps.taken and [path.name for path in steps.root.glob(".venv/*")] == [there]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("test-fast DATA=/tmp", "DATA is read by `make demo` alone"),
        ("gpu-check TORCH=2.13.0", "takes the torch of PYTHON"),
        ("wheel PYTHON=python9", "error: PYTHON=python9 is no program"),
        ("gpu-check PYTHON=python9", "error: PYTHON=python9 is no program"),
    ],
)
def test_make_looks_at_its_variables_first(typed: str, says: str) -> None:
    root = Path(setup_environment.__file__).parents[1]
    # As from a shell: below `make test`, these variables would make it print the folders that it enters.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    make = functools.partial(subprocess.run, cwd=root, env=env, capture_output=True, text=True)
    done = make(["make", *typed.split()])
    assert done.returncode == 2 and says in done.stderr and not done.stdout
    for target, option in (("demo DATA=/x", "--data='/x'"), ("wheel", "--oldest=2.10"), ("demo-translation", "")):
        planned = make(["make", "-n", *target.split()]).stdout
        assert re.search(rf"setup_environment.py --torch=\S+ .*{option}", planned), planned
        assert ("--data" in planned) == (option.startswith("--data"))


def test_a_step_leaves_the_kernels_to_the_end_and_shows_why_it_failed(tmp_path: Path, capsys) -> None:
    log = tmp_path / "setup.log"
    setup_environment.step("this project", ["sh", "-c", "echo builds $FASTWEIGHTS_BUILD"], log)
    assert log.read_text().endswith("\nbuilds none\n")
    with pytest.raises(SetupError, match=r"could not install torch 9\.9; .*setup.log"):
        setup_environment.step("torch 9.9", ["sh", "-c", "echo none found; exit 3"], log)
    assert "none found" in capsys.readouterr().err
