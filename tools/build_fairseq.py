"""Builds fairseq 0.12.2 with the patches in `patches/`, and installs it where it runs.

    python tools/build_fairseq.py [--constraint FILE] [--force]

fairseq's last release cannot be installed on today's Python, and its repository is archived. This takes the release's
own source from the package index, checks it by its hash, patches it, builds a wheel of a version of its own and
installs that with its requirements for the Python that runs this file. It needs git, which applies the patches, pip, a
C++ compiler and Python's headers. pip's environment variables count: PIP_FIND_LINKS may name a folder with the source,
`fairseq-0.12.2.tar.gz`.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from fairseq_patches import FILES, VERSION, BuildError, apply_patches, git

SDIST_SHA256 = "34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524"


def main(arguments: list[str] | None = None) -> int:
    """Builds and installs fairseq unless a working one is there; returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds fairseq 0.12.2 for today's Python, and installs it.")
    parser.add_argument("--constraint", type=Path, metavar="FILE", help="pip's constraints for what fairseq requires")
    parser.add_argument("--force", action="store_true", help="build and install even where a fairseq works")
    options = parser.parse_args(arguments)
    try:
        if not (3, 10) <= sys.version_info[:2] <= (3, 13):
            version = platform.python_version()
            raise BuildError(f"this is Python {version}, and fairseq can be built for Python 3.10 to 3.13")
        if options.constraint is not None and not options.constraint.is_file():
            raise BuildError(f"--constraint {options.constraint}: there is no such file")
        if options.force or must_install():
            build(options.constraint)
    except (BuildError, OSError, shutil.ReadError) as error:
        print(f"error: {error}; fairseq that is installed now: {installed_version()}", file=sys.stderr)
        return 1
    return 0


def must_install() -> bool:
    """Says whether this environment lacks a fairseq that works, and prints what it has."""
    version = installed_version()
    if version is None:
        return True
    if failure := import_failure():
        print(f"fairseq {version} is installed and cannot be imported ({failure}); replacing it")
        return True
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (0, 12):
        raise BuildError(f"fairseq {version} is installed, and 0.12 or newer is needed (--force replaces it)")
    print(f"fairseq {version} is installed and works: left as it is (--force replaces it)")
    return False


def installed_version() -> str | None:
    """The version of the fairseq in this environment, if there is one."""
    try:
        return metadata.version("fairseq")
    except metadata.PackageNotFoundError:
        return None


def import_failure() -> str | None:
    """Why fairseq and its compiled parts cannot be imported, in one line; None if they can."""
    modules = "fairseq, fairseq.libbleu, fairseq.data.data_utils_fast, fairseq_cli.train"
    # In a folder of its own, where nothing else is named fairseq.
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([sys.executable, "-c", f"import {modules}"], cwd=folder, capture_output=True, text=True)
    lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    return None if result.returncode == 0 else lines[-1]


def build(constraint: Path | None) -> None:
    """Everything from the sdist to the check of what was installed."""
    with tempfile.TemporaryDirectory(prefix="fairseq-") as folder:
        source = download(Path(folder))
        apply_patches(source)
        print(f"building and installing fairseq {VERSION} (about a minute)")
        # In isolation: where setup.py finds torch it asks for more C++ files than the sdist has.
        doing = "build fairseq (this needs a C++ compiler and Python's header files)"
        pip("wheel", "--no-deps", "--wheel-dir", folder, str(source), doing=doing)
        install(next(Path(folder).glob("fairseq-*.whl")), constraint)
        print(f"fairseq {VERSION} is installed")


def download(folder: Path) -> Path:
    """The unpacked source of the release, in `folder`."""
    git("--version", folder=folder, doing="apply the patches")
    (folder / "fairseq.txt").write_text(f"--no-binary fairseq\nfairseq==0.12.2 --hash=sha256:{SDIST_SHA256}\n")
    # pip also runs the source's setup.py for its metadata, in an environment for builds: what is installed there is
    # pinned as for the wheel, in the two ways that old and new releases of pip understand.
    pins = folder / "build.txt"
    pins.write_text("\n".join(re.findall(r'"(\S+==\S+)"', (FILES / "pyproject.toml").read_text())))
    environment = {"PIP_CONSTRAINT": str(pins), "PIP_BUILD_CONSTRAINT": str(pins)}
    flags = ["--no-deps", "--dest", str(folder), "--requirement", f"{folder}/fairseq.txt"]
    pip("download", *flags, doing="download the source of fairseq 0.12.2", environment=environment)
    shutil.unpack_archive(folder / "fairseq-0.12.2.tar.gz", folder)
    return folder / "fairseq-0.12.2"


def install(wheel: Path, constraint: Path | None) -> None:
    """Installs the wheel with what it requires; takes it out again if it does not work."""
    constraints = [] if constraint is None else ["--constraint", str(constraint)]
    was_there = installed_version() is not None
    pip("install", *constraints, str(wheel), doing="install what fairseq requires")
    if was_there:  # pip takes a wheel of the version that is installed for done
        pip("install", "--no-deps", "--force-reinstall", str(wheel), doing="install fairseq")
    if failure := import_failure():
        pip("uninstall", "--yes", "fairseq", doing="remove fairseq again")
        raise BuildError(f"the fairseq that was built cannot be imported: {failure}")


def pip(*arguments: str, doing: str, environment: dict[str, str] | None = None) -> None:
    """Runs pip, which says on stderr what is wrong; raises `BuildError` where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if subprocess.run(command, env=os.environ | (environment or {})).returncode:
        raise BuildError(f"cannot {doing}; what pip says is above")


if __name__ == "__main__":
    sys.exit(main())
