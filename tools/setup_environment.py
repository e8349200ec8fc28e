"""Makes `.venv`, the environment in which the tests and the demo run: what `make setup` does.

    python tools/setup_environment.py [--torch VERSION] [--any-python] [--any-torch]

The last thing that is written into a finished `.venv` is a stamp, which says what it was made from. A run that finds
the stamp it would write is done at once; one that finds another, or none, makes it anew. Every run builds what changed
of the compiled kernels, which lie in the sources' folder (tools/native_build.py).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
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
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    *("constraints.txt", "pyproject.toml", "setup.py", "tools/build_fairseq.py", "tools/setup_environment.py"),
    *sorted(f"tools/{path.name}" for path in Path(__file__).parent.glob("fairseq_*.py")),
    *("fairseq_fastweights/digests.py", "fairseq_fastweights/integrity.py"),  # which fairseq gets a copy of
)
"""The files that decide what is in the environment."""
STAMP, LOG = "setup-finished.json", "setup.log"


class SetupError(Exception):
    """Something that ends the set-up; its text is for the person who started it."""


def main(arguments: list[str] | None = None) -> int:
    """Makes the environment unless a finished one is there; returns the exit status."""
    parser = argparse.ArgumentParser(description="Makes .venv, with all that tests and demo need.")
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="version of torch (default: 2.13.0)")
    parser.add_argument("--any-python", action="store_true", help="a finished .venv of another Python will do")
    parser.add_argument("--any-torch", action="store_true", help="a finished .venv with another torch will do")
    options = parser.parse_args(arguments)
    environment = Environment(ROOT, options.torch)
    try:
        if not environment.is_finished(options.any_python, options.any_torch):
            environment.check_this_python()
            with Path(__file__).open() as lock:
                # A second set-up waits until this one ends, and its steps, which may outlive it where it is killed.
                fcntl.flock(lock, fcntl.LOCK_EX)
                environment.inherited = (lock.fileno(),)
                if not environment.is_finished(options.any_python, options.any_torch):
                    environment.remove_what_is_there()
                    environment.make()
        if subprocess.run([str(environment.python), "tools/native_build.py"], cwd=ROOT).returncode:
            raise SetupError("the kernels that FASTWEIGHTS_BUILD asks for were not built")
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the next run will begin again", file=sys.stderr)
        return 130
    return 0


class Environment:
    """The `.venv` of a checkout, finished or not."""

    def __init__(self, root: Path, torch: str) -> None:
        self.root = root
        self.torch = torch
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.inherited: tuple[int, ...] = ()

    def stamp(self) -> dict[str, str]:
        """What the environment is made from."""
        digest = hashlib.sha256(str(self.root).encode())  # scripts in .venv contain its path
        for source in SOURCES:
            digest.update(source.encode() + b"\0" + (self.root / source).read_bytes() + b"\0")
        return {"python": platform.python_version(), "torch": self.torch, "sources": digest.hexdigest()}

    def is_finished(self, any_python: bool, any_torch: bool) -> bool:
        """Whether a set-up ran to its end here and would not be another one today; says so."""
        try:
            found: dict[str, str] = json.loads((self.folder / STAMP).read_text())
        except (OSError, ValueError):
            return False
        free = {"python": any_python, "torch": any_torch}
        changed = (key for key, value in self.stamp().items() if found.get(key) != value and not free.get(key))
        if not os.access(self.python, os.X_OK) or any(changed):
            return False
        print(f".venv is ready: Python {found.get('python')}, torch {found.get('torch')}")
        return True

    def check_this_python(self) -> None:
        """Raises `SetupError` if the Python that runs this cannot make the environment."""
        version, hint = platform.python_version_tuple(), "choose another one with `make setup PYTHON=...`"
        if not (3, 10) <= sys.version_info[:2] <= (3, 13):
            raise SetupError(f"{sys.executable} is Python {'.'.join(version)}; 3.10 to 3.13 will do: {hint}")
        if lacking := [module for module in ("venv", "ensurepip") if importlib.util.find_spec(module) is None]:
            package = f"on Debian and Ubuntu it is in the package python{version[0]}.{version[1]}-venv"
            raise SetupError(f"{sys.executable} lacks the module {lacking[0]} ({package}): install it, or {hint}")
        if not os.access(base_python(), os.X_OK):
            raise SetupError(f"{sys.executable} is of an environment whose Python, {base_python()}, is gone: {hint}")
        if not re.fullmatch(r"\d+\.\d+(\.\d+)?\S*", self.torch):
            raise SetupError(f"TORCH={self.torch} is no version; it should be like 2.13.0")

    def remove_what_is_there(self) -> None:
        """Removes an environment that was interrupted or is outdated; nothing else."""
        made_here = (self.folder / "pyvenv.cfg").exists() or (self.folder / LOG).exists()
        if self.folder.is_symlink() or (self.folder.exists() and not made_here):
            raise SetupError(f"{self.folder} is no environment of Python; move it away")
        if self.folder.exists():
            print(".venv was not finished, or is of other versions or sources: making it anew", flush=True)
            shutil.rmtree(self.folder)

    def make(self) -> None:
        """Every step from an empty folder to the stamp."""
        started = time.monotonic()
        stamp = self.stamp()  # of the files as they are now, should one change meanwhile
        self.folder.mkdir()
        python, constraint = str(self.python), ["--constraint", "constraints.txt"]
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
        print(f"making .venv: Python {stamp['python']}, torch {self.torch}", flush=True)
        with (self.folder / LOG).open("w") as log:
            for title, command in (
                ("an empty environment", [base_python(), "-m", "venv", str(self.folder)]),
                (f"torch {self.torch}", [*pip, *constraint, f"torch=={self.torch}"]),
                ("the packages of constraints.txt", [*pip, "--requirement", "constraints.txt"]),
                ("fairseq 0.12.2, cured", [python, "tools/build_fairseq.py", *constraint]),
                ("this project", [*pip, *constraint, "--no-build-isolation", "--editable", "."]),
                ("a first import of all", [python, "-c", "import torch, fairseq, fairseq_fastweights"]),
            ):
                self.step(title, command, log)
        temporary = self.folder / f"{STAMP}.new"
        temporary.write_text(json.dumps(stamp, indent=1) + "\n")
        temporary.replace(self.folder / STAMP)
        print(f".venv is ready ({time.monotonic() - started:.0f} s)")

    def step(self, title: str, command: list[str], log: TextIO) -> None:
        """Runs one command, its output in the log; shows the log's end if it fails."""
        print(f"  {title} ...", end=" ", flush=True)
        started = time.monotonic()
        print("$", *command, file=log, flush=True)
        result = subprocess.run(command, cwd=self.root, stdout=log, stderr=subprocess.STDOUT, pass_fds=self.inherited)
        if result.returncode == 0:
            print(f"{time.monotonic() - started:.0f} s", flush=True)
            return
        print("failed", flush=True)
        print("\n".join(Path(log.name).read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
        raise SetupError(f"could not install {title}; all output: {log.name}")


def base_python() -> str:
    """What made this one's environment, which may be an outdated `.venv`; this one, if it is of none."""
    own = os.path.join(sys.base_exec_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    return sys.executable if sys.prefix == sys.base_prefix else own


if __name__ == "__main__":
    sys.exit(main())
