"""Makes `.venv`, the environment of tests and demos, for `make setup`.

    python tools/setup_environment.py [--torch VERSION] [--any-python] [--any-torch]

The last file that is written into a finished `.venv` is a stamp of the versions and sources that it was made from. A
run that finds the stamp it would write is done at once; one that finds another, or none, makes it anew. Every run
builds changes of the compiled kernels, which lie in the sources' folder (tools/native_build.py).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fairseq_patches import PATCHES, SHARED
from native_build import wait_for

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "setup.py"
"""It says the oldest torch."""
SOURCES = (
    *("constraints.txt", "pyproject.toml", "setup.py", "tools/build_fairseq.py", "tools/setup_environment.py"),
    "tools/fairseq_patches.py",
    *sorted(x.relative_to(ROOT).as_posix() for x in PATCHES.rglob("*") if x.suffix != ".pyc" and x.is_file()),
    *(f"fairseq_fastweights/{name}" for name in SHARED),
)
"""The files that the environment depends on."""
STAMP, LOG = "setup-finished.json", "setup.log"
BASE_PYTHON = str(getattr(sys, "_base_executable", sys.executable))
"""The Python that made this one's environment, which may be an outdated `.venv`; this one, if it has none."""


class SetupError(Exception):
    """Something that ends the set-up; its text is for the person who started it."""


def main(arguments: list[str] | None = None) -> int:
    """Makes the environment unless a finished one is there; returns the exit status."""
    parser = argparse.ArgumentParser(description="Makes .venv, with all that tests and demo need.")
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="version of torch (default: 2.13.0)")
    parser.add_argument("--any-python", action="store_true", help="a finished .venv of another Python will do")
    parser.add_argument("--any-torch", action="store_true", help="a finished .venv with another torch will do")
    parser.add_argument("--oldest", default="", metavar="VERSION", help="the oldest torch that will do")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="text of the demo, which is looked at first")
    options = parser.parse_args(arguments)
    folder, stamp = ROOT / ".venv", stamp_of(options.torch)
    free = {name for name in ("python", "torch") if getattr(options, f"any_{name}")}
    try:
        check_torch(options.torch, options.oldest)
        if options.data is not None:
            check_data(options.data)
        with Path(__file__).open() as lock:
            # A second set-up waits until this one ends, and its steps, which may outlive it where it is killed.
            wait_for(lock, f"another set-up of {folder} (its log: {folder / LOG})")
            os.set_inheritable(lock.fileno(), True)
            if not is_finished(folder, stamp, free):
                check(folder)
                make(folder, stamp)
        if subprocess.run([str(folder / "bin/python"), "tools/native_build.py"], cwd=ROOT).returncode:
            raise SetupError("the kernels that FASTWEIGHTS_BUILD asks for were not built")
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the next run will begin again", file=sys.stderr)
        return 130
    return 0


def stamp_of(torch: str) -> dict[str, str]:
    """The versions and sources that an environment is made from."""
    digest = hashlib.sha256(str(ROOT).encode())  # scripts in .venv contain its path
    for source in SOURCES:
        digest.update(source.encode() + b"\0" + (ROOT / source).read_bytes() + b"\0")
    return {"python": platform.python_version(), "torch": torch, "sources": digest.hexdigest()}


def is_finished(folder: Path, stamp: dict[str, str], free: set[str]) -> bool:
    """True if a set-up ran to its end here and would give the same today, but for the `free` versions; says so."""
    try:
        found: dict[str, str] = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return False
    changed = {key for key, value in stamp.items() if found.get(key) != value}
    if changed - free or not os.access(folder / "bin/python", os.X_OK):
        return False
    print(f".venv is ready: Python {found.get('python')}, torch {found.get('torch')}")
    return True


def check_torch(torch: str, oldest: str) -> None:
    """Raises `SetupError` unless `torch` is a version that this project runs with, of at least `oldest`."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?\S*", torch):
        raise SetupError(f"TORCH={torch} is no version; it should be like 2.13.0")
    oldest = oldest or re.findall(r'"torch>=([\d.]+)"', SETUP.read_text())[0]
    numbers = [[int(number) for number in re.findall(r"\d+", version)[:2]] for version in (torch, oldest)]
    if numbers[0] < numbers[1]:
        raise SetupError(f"TORCH={torch} is too old; it must be {oldest} or later, and 2.13.0 is tested")


def check_data(folder: Path) -> None:
    """Raises `SetupError` unless the demo finds its text in `folder`."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    corpora = importlib.import_module("demo.corpora")
    try:
        corpora.find_texts(folder)
    except corpora.UserError as error:
        raise SetupError(f"DATA: {error}") from None


def check(folder: Path) -> None:
    """Raises `SetupError` if this Python cannot make the environment, or the folder holds something else."""
    version, hint = platform.python_version(), "choose another one with `make setup PYTHON=...`"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        raise SetupError(f"{sys.executable} is Python {version}; 3.10 to 3.13 will do: {hint}")
    if lacking := [module for module in ("venv", "ensurepip") if importlib.util.find_spec(module) is None]:
        package = f"on Debian and Ubuntu it is in the package python{version.rpartition('.')[0]}-venv"
        raise SetupError(f"{sys.executable} lacks the module {lacking[0]} ({package}): install it, or {hint}")
    if not os.access(BASE_PYTHON, os.X_OK):
        raise SetupError(f"{sys.executable} is of an environment whose Python, {BASE_PYTHON}, is gone: {hint}")
    made_here = (folder / "pyvenv.cfg").exists() or (folder / LOG).exists()
    if folder.is_symlink() or (folder.exists() and not made_here):
        raise SetupError(f"{folder} is no environment of Python; move it away")


def make(folder: Path, stamp: dict[str, str]) -> None:
    """Every step from an empty folder to the stamp."""
    started = time.monotonic()
    if folder.exists():
        print(".venv was not finished, or is of other versions or sources: making it anew", flush=True)
        shutil.rmtree(folder)
    folder.mkdir()
    python, constraint = str(folder / "bin/python"), ["--constraint", "constraints.txt"]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    print(f"making .venv: Python {stamp['python']}, torch {stamp['torch']}", flush=True)
    for title, command in (
        ("an empty environment", [BASE_PYTHON, "-m", "venv", str(folder)]),
        (f"torch {stamp['torch']}", [*pip, *constraint, f"torch=={stamp['torch']}"]),
        ("the packages of constraints.txt", [*pip, "--requirement", "constraints.txt"]),
        ("fairseq 0.12.2, patched", [python, "tools/build_fairseq.py", *constraint]),
        ("this project", [*pip, *constraint, "--no-build-isolation", "--editable", "."]),
        ("a first import of all", [python, "-c", "import torch, fairseq, fairseq_fastweights"]),
    ):
        step(title, command, folder / LOG)
    # The stamp comes last: without it the next run begins anew.
    (folder / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
    print(f".venv is ready ({time.monotonic() - started:.0f} s)")


def step(title: str, command: list[str], log: Path) -> None:
    """Runs one command, its output in the log; shows the log's end if it fails. It compiles no kernels."""
    print(f"  {title} ...", end=" ", flush=True)
    started = time.monotonic()
    with log.open("a") as file:
        print("$", *command, file=file, flush=True)
        # Kernels are compiled at the end, where it shows.
        environment = os.environ | {"FASTWEIGHTS_BUILD": "none"}
        output: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment}
        result = subprocess.run(command, cwd=ROOT, close_fds=False, **output)  # which keep the lock open
    print(f"{time.monotonic() - started:.0f} s" if result.returncode == 0 else "failed", flush=True)
    if result.returncode:
        print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
        raise SetupError(f"could not install {title}; all output: {log}")


if __name__ == "__main__":
    sys.exit(main())
