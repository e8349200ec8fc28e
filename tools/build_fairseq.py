"""Builds fairseq 0.12.2 with the patches in `patches/`, and installs it where it runs.

    python tools/build_fairseq.py [--constraint FILE] [--force]

fairseq's last release cannot be installed on today's Python, and its repository is archived. This takes the release's
source from the package index, checks its hash, patches it, and installs it, as a version of its own, with its
requirements for the Python that runs this file. It needs git, pip, a C++ compiler and Python's headers. pip's variables
count: PIP_FIND_LINKS may name a folder with the source, `fairseq-0.12.2.tar.gz`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from fairseq_patches import FILES, VERSION, BuildError, apply_patches

SDIST_SHA256 = "34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524"


def main(arguments: list[str] | None = None) -> int:
    """Builds and installs fairseq unless a working one is there; returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds fairseq 0.12.2 for today's Python, and installs it.")
    parser.add_argument("--constraint", type=Path, metavar="FILE", help="pip's constraints for what fairseq requires")
    parser.add_argument("--force", action="store_true", help="build and install even where a fairseq works")
    options = parser.parse_args(arguments)
    try:
        if not (3, 10) <= sys.version_info[:2] <= (3, 13):
            raise BuildError(f"this is Python {sys.version.split()[0]}, and fairseq can be built for 3.10 to 3.13")
        if options.constraint and not options.constraint.is_file():
            raise BuildError(f"--constraint {options.constraint}: there is no such file")
        # A fairseq that works may be the user's own: it stays.
        if (version := installed_version()) and not options.force:
            if failure := import_failure():
                print(f"fairseq {version} is installed and cannot be imported ({failure}); replacing it")
            elif tuple(map(int, re.findall(r"\d+", version)[:2])) < (0, 12):
                raise BuildError(f"fairseq {version} is installed, and 0.12 or newer is needed (--force replaces it)")
            else:
                print(f"fairseq {version} is installed and works: left as it is (--force replaces it)")
                return 0
        install(["--constraint", str(options.constraint)] if options.constraint else [])
    except (BuildError, OSError, shutil.ReadError) as error:
        print(f"error: {error}; fairseq that is installed now: {installed_version()}", file=sys.stderr)
        return 1
    return 0


def installed_version() -> str | None:
    """The version of the fairseq in this environment, if there is one."""
    return next((found.version for found in metadata.distributions(name="fairseq")), None)


def import_failure() -> str | None:
    """Why fairseq and its compiled parts cannot be imported, in one line; None if they can."""
    command = [sys.executable, "-c", "import fairseq.libbleu, fairseq.data.data_utils_fast, fairseq_cli.train"]
    with tempfile.TemporaryDirectory() as folder:  # where nothing else is named fairseq
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    return lines[-1] if result.returncode else None


def install(constraint: list[str]) -> None:
    """Builds and installs fairseq with its requirements; removes it again if it does not work."""
    with tempfile.TemporaryDirectory(prefix="fairseq-") as folder:
        source = download(Path(folder))
        apply_patches(source)
        print(f"building and installing fairseq {VERSION} (about a minute)")
        # In isolation: where setup.py finds torch it asks for more C++ files than the sdist has.
        pip("install", *constraint, str(source), doing="build fairseq (this needs a C++ compiler and Python's headers)")
    if failure := import_failure():
        pip("uninstall", "--yes", "fairseq", doing="remove fairseq again")
        raise BuildError(f"the fairseq that was built cannot be imported: {failure}")
    print(f"fairseq {VERSION} is installed")


def download(folder: Path) -> Path:
    """The unpacked source of the release, in `folder`."""
    if shutil.which("git") is None:
        raise BuildError("git is not installed, and is needed to apply the patches")
    wanted, pins = folder / "fairseq.txt", folder / "build.txt"
    wanted.write_text(f"--no-binary fairseq\nfairseq==0.12.2 --hash=sha256:{SDIST_SHA256}\n")
    # pip also runs the source's setup.py for its metadata, in an environment for builds, whose packages are pinned as
    # for the wheel, in the two ways that old and new releases of pip understand.
    pins.write_text("\n".join(re.findall(r'"(\S+==\S+)"', (FILES / "pyproject.toml").read_text())))
    pinned = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(pins))
    flags = ["--no-deps", "--dest", str(folder), "--requirement", str(wanted)]
    pip("download", *flags, doing="download the source of fairseq 0.12.2", **pinned)
    shutil.unpack_archive(folder / "fairseq-0.12.2.tar.gz", folder)
    return folder / "fairseq-0.12.2"


def pip(*arguments: str, doing: str, **environment: str) -> None:
    """Runs pip, whose errors are on stderr; raises `BuildError` where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if subprocess.run(command, env=os.environ | environment).returncode:
        raise BuildError(f"cannot {doing}; what pip says is above")


if __name__ == "__main__":
    sys.exit(main())
