"""Runs the long checks of the compiled kernels, and records of which files they passed.

    python tools/recorded_passes.py emulated|sanitized ...             runs them, records that they passed
    python tools/recorded_passes.py --changed emulated|sanitized ...   only where the files are not those recorded

`tests/recorded_passes.json` holds, for each check, a digest of the files that it depends on, as they were when it last
passed. It is committed with a change of those files, so that `make test` need not run them again.

"emulated" runs the long tests of the CUDA kernels in the emulator. "sanitized" builds the CPU kernels with
AddressSanitizer and UndefinedBehaviorSanitizer into build/sanitized, and runs those tests of the operations that reach
different paths of the kernels: new memory reads as NaN, and the first error of either sanitizer ends the run. Leaks are
not reported, as Python frees little of its memory at its end. PYTEST_ADDOPTS may have further options of pytest.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from native_build import LIBRARIES
from native_toolchain import HostCompiler, Unavailable, first_line

ROOT = Path(__file__).resolve().parents[1]
RECORD = "tests/recorded_passes.json"
SANITIZED = ROOT / "build" / "sanitized"
LONGEST = 25 * 60
"""Seconds of the sanitized tests, which take a few minutes on two cores."""
FILES = (
    *("tests/ops/test_native.py", "tests/ops/test_native_cpu.py", "tests/ops/test_backends.py"),
    *("tests/ops/test_documents.py", "tests/ops/test_selective_scan.py", "tests/ops/test_elementwise.py"),
    *("tests/ops/test_steps.py", "tests/mixers/test_short_convolution.py"),
)
# Sizes and full chunks; dtypes, regimes, infinities and NaN; strides, threads, steps and instruction sets.
PATHS = """
    papers_sizes fill_chunks empty_batches states_are_kept dtype regime magnitude gates_and_write_strengths not_finite
    strides windows where_they_lie threads step instruction_set documents_are heads_that kernel_is_the_definition
    are_their_definition layouts stays_in_its_vector underflowed operators_refuse
""".split()
ELSEWHERE = ("compile", "per_step", "4096_steps", "chunkwise")
# Tests skip themselves where the kernels cannot be loaded.
PROBE = (
    "import sys, torch; from fairseq_fastweights.ops import libraries; "
    "sys.exit(libraries.load('cpu') or (None if torch.empty(1000).isnan().all() else 'memory is not NaN'))"
)


def build_sanitized() -> dict[str, str]:
    """Builds the CPU kernels with sanitizers; returns the variables of a Python that loads them.

    Raises `Unavailable` where the compiler came without sanitizers, or the kernels cannot be loaded.
    """
    compiler = HostCompiler.find()
    # They must be loaded before Python, which was not compiled with sanitizers. libstdc++ too: AddressSanitizer looks
    # for its function that throws when it starts, and Python does not load it.
    preloaded = [
        Path(first_line([*compiler.command, f"-print-file-name=lib{x}.so"])) for x in ("asan", "ubsan", "stdc++")
    ]
    if missing := [path.name for path in preloaded if not path.is_absolute()]:
        remedy = "install g++ with its sanitizers, or name it with CXX=..."
        raise Unavailable(f"{compiler.name} has no {missing[0]}; {remedy}")
    build = [sys.executable, "tools/native_build.py", "--sanitize", "--into", str(SANITIZED)]
    if subprocess.run(build, cwd=ROOT).returncode:
        raise ValueError("the kernels with sanitizers were not built, as printed above")
    # New memory, torch's too, is full of NaN: a result that was not written everywhere, or that was made from unwritten
    # memory, fails its test.
    filled = "detect_leaks=0:halt_on_error=1:abort_on_error=0:max_malloc_fill_size=2147483647:malloc_fill_byte=255"
    variables = {
        "FASTWEIGHTS_NATIVE_CPU": str(SANITIZED / LIBRARIES.library("cpu").name),
        "LD_PRELOAD": ":".join(str(path.resolve()) for path in preloaded),
        "ASAN_OPTIONS": filled,
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # waiting threads leave the cores to other tests
    }
    if subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, env=os.environ | variables).returncode:
        raise ValueError("the kernels with sanitizers cannot be used, as printed above")
    return variables


class Check(NamedTuple):
    """A command, and patterns of the files below the repository's root that decide how it ends.

    `prepare` returns variables for the command; it raises `Unavailable` if something is not installed.
    """

    files: tuple[str, ...]
    command: tuple[str, ...]
    prepare: Callable[[], dict[str, str]] = dict
    seconds: float | None = None


CHECKS = {
    "emulated": Check(
        ("cuda/**/*.cu*", "cuda/**/*.h", "cuda/*.cpp", "native/*.h", "tests/cuda/*.py", "tests/cuda/emulation/**/*.*"),
        ("-m", "pytest", "-n", "auto", "-q", "-m", "emulated", "tests/cuda", "tests/tools/test_check_cuda_kernels.py"),
    ),
    "sanitized": Check(
        ("cpu/*.cpp", "cpu/**/*.h", "native/*.h", "tools/recorded_passes.py"),
        (
            *("-m", "pytest", *FILES, "-k", f"({' or '.join(PATHS)}) and not ({' or '.join(ELSEWHERE)})"),
            *("-q", "-x", "-p", "no:cacheprovider", "-n", "auto"),
        ),
        build_sanitized,
        LONGEST,
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
    check = CHECKS[name]
    try:
        HostCompiler.find()
        variables = os.environ | check.prepare()
    except Unavailable as reason:
        print(f"{name}: not run: {reason}", file=sys.stderr)
        return int(bool(os.environ.get("CI")))
    try:
        command = [sys.executable, *check.command]
        status = subprocess.run(command, cwd=root, env=variables, timeout=check.seconds).returncode
    except subprocess.TimeoutExpired:
        raise ValueError(f"{name}: not done after {check.seconds} s") from None
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
