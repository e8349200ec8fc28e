"""Runs the operations' tests on CPU kernels that AddressSanitizer and UndefinedBehaviorSanitizer watch.

    python tools/check_sanitizers.py [PYTEST OPTIONS ...]

Builds the kernels with both into build/sanitized, and runs on them those tests of tests/ops that reach different paths
of the kernels; tests of threads start their own. New memory reads as NaN. The first error of either sanitizer ends the
run. Leaks are not reported: Python frees little of its memory at its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from native_build import LIBRARIES, ROOT
from native_toolchain import HostCompiler, Unavailable, first_line

FOLDER = ROOT / "build" / "sanitized"
LONGEST = 25 * 60
"""Seconds; it takes a few minutes on two cores."""
NOT_RUN = 77
"""The exit status that automake's tests have for this."""
FILES = (
    *("tests/ops/test_native.py", "tests/ops/test_native_cpu.py", "tests/ops/test_backends.py"),
    *("tests/ops/test_documents.py", "tests/ops/test_selective_scan.py", "tests/ops/test_features.py"),
    *("tests/ops/test_gating.py", "tests/ops/test_steps.py", "tests/mixers/test_short_convolution.py"),
)
# Sizes and full chunks; dtypes, regimes, infinities and NaN; strides, threads, steps and instruction sets.
PATHS = """
    papers_sizes fill_chunks empty_batches states_are_kept dtype regime magnitude gates_and_write_strengths not_finite
    strides windows where_they_lie threads step instruction_set documents_are heads_that kernel_is_the_definition
    are_their_definition layouts stays_in_its_vector underflowed operators_refuse
""".split()
ELSEWHERE = ("compile", "per_step", "4096_steps", "chunkwise")
# New memory, torch's too, is full of NaN: a result that was not written everywhere, or that was made from unwritten
# memory, fails its test.
ASAN_OPTIONS = "detect_leaks=0:halt_on_error=1:abort_on_error=0:max_malloc_fill_size=2147483647:malloc_fill_byte=255"


def runtime_libraries(compiler: HostCompiler) -> list[Path]:
    """The library that must be loaded before Python, since Python itself was not compiled with sanitizers.

    Raises `Unavailable` where the compiler came without them.
    """
    # libstdc++ too: AddressSanitizer looks for its function that throws when it starts, and Python does not load it.
    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        path = Path(first_line([*compiler.command, f"-print-file-name={name}"]))
        if not path.is_absolute():
            remedy = "install g++ with its sanitizers, or name it with CXX=..."
            raise Unavailable(f"{compiler.name} has no {name}; {remedy}")
        found.append(path.resolve())
    return found


def environment(preloaded: list[Path]) -> dict[str, str]:
    """The environment of a Python that loads the sanitized kernels."""
    return {
        **os.environ,
        "FASTWEIGHTS_NATIVE_CPU": str(FOLDER / LIBRARIES.library("cpu").name),
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "ASAN_OPTIONS": ASAN_OPTIONS,
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # waiting threads leave the cores to other tests
    }


def main(arguments: list[str]) -> int:
    """Builds and tests; returns the exit status, `NOT_RUN` where there are no sanitizers."""
    try:
        preloaded = runtime_libraries(HostCompiler.find())
    except Unavailable as reason:
        print(f"sanitizers: not run: {reason}", file=sys.stderr)
        return NOT_RUN
    build = [sys.executable, "tools/native_build.py", "--sanitize", "--into", str(FOLDER)]
    if subprocess.run(build, cwd=ROOT).returncode:
        return 1
    # Tests skip themselves where the kernels cannot be loaded.
    probe = (
        "import sys, torch; from fairseq_fastweights.ops import libraries; "
        "sys.exit(libraries.load('cpu') or (None if torch.empty(1000).isnan().all() else 'memory is not NaN'))"
    )
    chosen = f"({' or '.join(PATHS)}) and not ({' or '.join(ELSEWHERE)})"
    pytest = ["-m", "pytest", *FILES, "-k", chosen, "-q", "-x", "-p", "no:cacheprovider"]
    for command in (["-c", probe], [*pytest, *arguments]):
        try:
            run = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment(preloaded), timeout=LONGEST)
        except subprocess.TimeoutExpired:
            print(f"sanitizers: not done after {LONGEST} s", file=sys.stderr)
            return 1
        if run.returncode:
            return run.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
