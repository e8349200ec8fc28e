"""Runs the long checks of the compiled kernels, and records of which files they passed.

    python tools/recorded_passes.py emulated|sanitized ...             runs them, records that they passed
    python tools/recorded_passes.py --changed emulated|sanitized ...   only where the files are not those recorded

`tests/recorded_passes.json` holds, for each check, a digest of the files that it depends on, as they were when it last
passed. It is committed with a change of those files, so that `make test` need not run them again.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from check_sanitizers import NOT_RUN
from native_toolchain import HostCompiler, Unavailable

ROOT = Path(__file__).resolve().parents[1]
RECORD = "tests/recorded_passes.json"


class Check(NamedTuple):
    """A command, and patterns of the files below the repository's root that decide how it ends."""

    files: tuple[str, ...]
    command: tuple[str, ...]


CHECKS = {
    "emulated": Check(
        ("cuda/**/*.cu*", "cuda/**/*.h", "cuda/*.cpp", "native/*.h", "tests/cuda/*.py", "tests/cuda/emulation/**/*.*"),
        ("-m", "pytest", "-n", "auto", "-q", "-m", "emulated", "tests/cuda", "tests/tools/test_check_cuda_kernels.py"),
    ),
    "sanitized": Check(
        ("cpu/*.cpp", "cpu/**/*.h", "native/*.h", "tools/check_sanitizers.py"),
        ("tools/check_sanitizers.py", "-n", "auto"),
    ),
}


def digest(root: Path, check: Check) -> str:
    """A digest of the files' names and contents. Raises `ValueError` if there are none of a pattern."""
    matching = {pattern: set(root.glob(pattern)) for pattern in check.files}
    if gone := [pattern for pattern, paths in matching.items() if not paths]:
        raise ValueError(f"no file is called {gone[0]} any more: change its check in tools/recorded_passes.py")
    found = hashlib.sha256()
    for path in sorted(set().union(*matching.values())):
        found.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()


def recorded(root: Path) -> dict[str, str]:
    """The digests by check. Raises `ValueError` if the file is none that this program writes."""
    try:
        passes: dict[str, str] = json.loads((root / RECORD).read_text())
        if not isinstance(passes, dict) or not set(passes) <= set(CHECKS):
            raise ValueError(f"it must hold digests of {', '.join(CHECKS)}")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{RECORD} is damaged: {error}; take it from git again, or delete it") from None
    return passes


def is_recorded(name: str, root: Path = ROOT) -> bool:
    """True if a check passed with the files as they are; raises as `digest` and `recorded` do."""
    return recorded(root).get(name) == digest(root, CHECKS[name])


def run(name: str, changed: bool, root: Path) -> int:
    """Runs a check, unless only `changed` ones are to run and it passed with these files; returns the exit status.

    A compiler that is missing is an error in CI alone; nothing is recorded without one.
    """
    before = digest(root, CHECKS[name])
    if changed and is_recorded(name, root):
        print(f"{name}: left out, it passed with these files; `make test-{name}` runs it", flush=True)
        return 0
    try:
        HostCompiler.find()
        status = subprocess.run([sys.executable, *CHECKS[name].command], cwd=root).returncode
    except Unavailable as reason:
        print(f"{name}: not run: {reason}", file=sys.stderr)
        status = NOT_RUN
    if status == NOT_RUN:
        return int(bool(os.environ.get("CI")))
    # Files that were edited meanwhile may not have been the ones that were tested.
    if status == 0 and digest(root, CHECKS[name]) == before:
        new = root / f"{RECORD}.new"
        new.write_text(json.dumps(recorded(root) | {name: before}, indent=1, sort_keys=True) + "\n")
        new.replace(root / RECORD)
    return status


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Runs the checks one after the other, until one fails; returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs the long checks of the compiled kernels.")
    parser.add_argument("checks", nargs="+", choices=list(CHECKS))
    parser.add_argument("--changed", action="store_true", help="leave out those that passed with the files as they are")
    options = parser.parse_args(arguments)
    try:
        return next((status for name in options.checks if (status := run(name, options.changed, root))), 0)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
