"""Runs the two long checks of the kernels, where their files are not those of the last pass on record.

    python tools/recorded_passes.py [--record] [emulated|sanitized ...]

A check takes minutes and depends on few files: tests/recorded_passes.json, which is committed with them, keeps the
digest of their contents at its last pass. Without names it runs the checks whose files have changed since, and says
which it left out. With names it runs these; with --record it writes down those that passed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path("tests/recorded_passes.json")


@dataclass(frozen=True)
class Check:
    """What is run, after Python's own name, and which files below the root decide whether it passes."""

    command: tuple[str, ...]
    files: tuple[str, ...]

    def digest(self, root: Path) -> str:
        """Of the files' names and bytes. Raises `ValueError` where a pattern finds none, which is out of date then."""
        found: set[Path] = set()
        for pattern in self.files:
            matching = {path for path in root.glob(pattern) if path.is_file()}
            if not matching:
                raise ValueError(f"no file is called {pattern} any more: change its check in tools/recorded_passes.py")
            found |= matching
        digest = hashlib.sha256()
        for name, path in sorted((path.relative_to(root).as_posix(), path) for path in found):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


CHECKS = {
    "emulated": Check(
        ("-m", "pytest", "tests/cuda", "-n", "auto", "-m", "emulated"),
        (
            *("cuda/*.cu", "cuda/*.cuh", "cuda/*.h", "cuda/*.cpp", "tests/cuda/*.py"),
            *("tests/cuda/emulation/**/*.h", "tests/cuda/emulation/*.cpp", "tests/cuda/emulation/*.cu"),
            *("tests/ops/rules.py", "fairseq_fastweights/ops/reference.py"),
        ),
    ),
    "sanitized": Check(
        ("tools/check_sanitizers.py", "-n", "auto"),
        (
            *("cpu/*.h", "cpu/*.cpp", "tools/check_sanitizers.py", "tests/ops/rules.py"),
            *("tests/ops/test_native*.py", "tests/ops/test_backends.py"),
        ),
    ),
}


def recorded(root: Path) -> dict[str, str]:
    """The digests on record. Raises `ValueError` if the file is not what this program writes."""
    path = root / RECORD
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); take it from git again, or remove it") from None
    if not isinstance(found, dict) or not all(
        name in CHECKS and re.fullmatch("[0-9a-f]{64}", str(digest)) for name, digest in found.items()
    ):
        names = ", ".join(CHECKS)
        raise ValueError(f"{path} must have a SHA-256 digest for each of {names}; take it from git again, or remove it")
    return found


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Returns the exit status of the first check that failed, 0 where none did, 2 if the record cannot be read."""
    parser = argparse.ArgumentParser(description="Runs the long checks of the kernels, where their files have changed.")
    parser.add_argument("names", nargs="*", metavar="|".join(CHECKS), help="run these (default: those that changed)")
    parser.add_argument("--record", action="store_true", help=f"write what passed into {RECORD}")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - CHECKS.keys():
        parser.error(f"there is no check called {', '.join(sorted(unknown))}")
    try:
        for name in options.names or CHECKS:
            check = CHECKS[name]
            digest = check.digest(root)
            if not options.names and recorded(root).get(name) == digest:
                print(f"{name}: left out, since its files are those of the last pass; `make test-{name}` runs it")
                continue
            print(f"{name}: running", flush=True)
            status = subprocess.run([sys.executable, *check.command], cwd=root).returncode
            if status:
                return status
            if check.digest(root) != digest:
                print(f"{name}: its files changed while it ran; nothing is recorded", file=sys.stderr)
                return 1
            if options.record:
                text = json.dumps(recorded(root) | {name: digest}, indent=4, sort_keys=True) + "\n"
                part = (root / RECORD).with_suffix(".part")
                part.write_text(text, encoding="utf-8")
                os.replace(part, root / RECORD)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
