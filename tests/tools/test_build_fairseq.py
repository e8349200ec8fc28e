"""fairseq is built from the source that the patches are for, or not at all."""

import re
import shutil
import tarfile
from pathlib import Path
from unittest.mock import Mock

import build_fairseq
import edit_patches
import fairseq
import fairseq_patches
import pytest
from fairseq_patches import FILES, SHARED, VERSION, BuildError, apply_patches, git, in_order

INSTALLED = Path(fairseq.__file__).parents[1]
PATCHES = in_order()[1:]
"""Without that of setup.py, which is not installed."""


@pytest.fixture
def source(our_fairseq: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the release that are patched: those of the fairseq that is installed, with all patches undone."""
    monkeypatch.setattr(fairseq_patches, "in_order", lambda: PATCHES)
    root = tmp_path / "fairseq-0.12.2"
    for name in {name for patch in PATCHES for name in re.findall(r"^diff --git .* b/(.*)", patch.read_text(), re.M)}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / name, root / name)
    for patch in reversed(PATCHES):
        git("apply", "--reverse", str(patch), folder=root, doing=f"find {patch.name} in the fairseq that is installed")
    return root


def test_the_fairseq_that_is_installed_is_the_release_with_the_patches(source: Path, monkeypatch) -> None:
    """One that is changed without a new version would be what the tests see, and no user has."""
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    names |= {path.relative_to(FILES).as_posix() for path in FILES.rglob("*.*") if path.suffix != ".pyc"}
    # Neither a repository around the source nor what git is told otherwise counts.
    git("init", folder=source.parent, doing="make a repository")
    monkeypatch.setenv("GIT_DIR", f"{source.parent}/.git")
    monkeypatch.setenv("GIT_WORK_TREE", str(source.parent))
    apply_patches(source)
    # A wheel has the version in a module.
    for name in names - {"pyproject.toml", "fairseq/version.txt"} | {f"fairseq/{name}" for name in SHARED}:
        assert (source / name).read_bytes() == (INSTALLED / name).read_bytes(), name
    assert fairseq.__version__ == VERSION
    with pytest.raises(BuildError, match=rf"^cannot apply {PATCHES[0].name} to the source of .*: fairseq"):
        apply_patches(source)


A, B = "ImportError: a", "ImportError: b"


@pytest.mark.parametrize(
    ("version", "before", "after", "arguments", "calls", "left", "says"),
    [
        (None, None, None, "", "download install", VERSION, f"fairseq {VERSION} is installed\n"),
        # One that works is left alone.
        (VERSION, None, None, "", "", VERSION, "left as it is"),
        ("1.0.0a0", None, None, "", "", "1.0.0a0", "left as it is"),
        ("0.10.2", None, None, "", "", "0.10.2", "error: fairseq 0.10.2 is installed, and 0.12"),
        ("0.10.2", None, None, "--force", "download install", VERSION, ""),
        # One that does not work is replaced; what is new and does not work is taken out again.
        (VERSION, A, None, "", "download install", VERSION, f"({A}); replacing"),
        ("0.12.2", A, B, "", "download install uninstall", None, f"error: .*{B}; .* now: None\n"),
        (None, None, None, "--constraint no/such", "", None, "error: --constraint no/such: there is no"),
        (None, None, None, "", "", None, "error: git is not installed, and is needed to apply the patches; fairseq"),
    ],
)
def test_installs_what_is_needed_and_says_what_is_left(
    version, before, after, arguments, calls, left, says, tmp_path, capsys, monkeypatch
) -> None:
    """In an environment whose fairseq has the failure `before`, and the new one `after`."""
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

    monkeypatch.setattr(build_fairseq, "pip", pip)
    monkeypatch.setattr(build_fairseq, "apply_patches", patched)
    monkeypatch.setattr(build_fairseq, "installed_version", lambda: environment["version"])
    monkeypatch.setattr(build_fairseq, "import_failure", lambda: environment["failure"])
    if "git" in says:
        monkeypatch.setenv("PATH", "")
    status = build_fairseq.main(arguments.split())
    printed = capsys.readouterr()
    said = "".join(printed)
    assert re.search(re.sub(r"[()+]", r"\\\g<0>", says), said), said
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

    def edit(what: str, says: str, status: int = 0) -> set[str]:
        """Opens or saves; the names of the patches that are not as they were."""
        assert edit_patches.main([what, str(commits)]) == status
        assert re.search(says, "".join(capsys.readouterr()))
        return {name for name, _ in before.items() ^ {patch.name: patch.read_bytes() for patch in in_order()}.items()}

    assert not edit("save", r"error: .*/commits is no repository; FOLDER must be one that `open` made\n", 1)
    assert not edit("open", "^$")
    assert not edit("open", r"error: .*/commits exists; FOLDER must be a new one\n", 1)
    assert not edit("save", f"{len(before)} patches are in")
    (commits / "new.py").write_text("changed\n")
    assert not edit("save", "error: .*: 1 changed files are not committed, among them new.py", 1)
    edit_patches._commit(commits, "Setup: no more\n\nIts reason.")
    assert edit("save", "") == {name := f"{len(before) + 1:04d}-setup-no-more.patch"}
    assert (patches / name).read_text().startswith("Setup: no more\n\nIts reason.\n\ndiff")
