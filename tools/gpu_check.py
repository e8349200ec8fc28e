"""Checks the compiled kernels on a GPU, unattended, for `make gpu-check`.

    python tools/gpu_check.py [--minutes 9] [STAGE ...]

Builds the kernels for this machine's GPU, runs the operations' tests on it, trains small models if there is a fairseq,
captures and compares small programs, lets compute-sanitizer watch every operator, and measures. It needs CUDA's
compiler, a torch with CUDA and pytest, and no network. Each stage has its own time limit, and none stops the others.
On a machine lent for minutes, --minutes ends it in time; libraries that were built stay, and another run can have some
stages only. The stages' results go to ``benchmarks/results/<device>.json``, whose other contents stay, beside the
measurements, and the output of each to ``build/gpu-check``. The exit status is 1 if a stage failed.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "gpu-check"
SANITIZERS = ("memcheck", "initcheck", "racecheck", "synccheck")


class Stage(NamedTuple):
    """A command that may take `limit` seconds, or the time left if that is less."""

    name: str
    command: Sequence[str]
    limit: float
    environment: dict[str, str] = {}


def stages(device: str) -> list[Stage]:
    """The stages, in this order. The limits end stages that hang; each is several times the usual time."""
    python = sys.executable
    # The reference that results are held against takes cores; but each process takes memory of the GPU for itself.
    parallel = ["-n", str(min(10, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel]
    tests = [*pytest, "tests/ops"]
    models = ["tests/tasks/test_on_a_gpu.py", "tests/examples/test_synthetic.py"]
    on_gpu = {"FASTWEIGHTS_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    exercise = [python, "tools/gpu_exercise.py"]
    # compute-sanitizer lies beside nvcc, which need not be on PATH.
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), *(f"{home}/bin" for home in homes if home)])
    sanitizer = [shutil.which("compute-sanitizer", path=places) or "compute-sanitizer", "--error-exitcode", "86"]
    sanitizer += ["--print-limit", "20", "--tool"]
    # torch's allocator would hide accesses out of bounds within its blocks, and reuse memory that one call has written:
    # each tensor gets memory of its own.
    own_memory = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    benchmark = [python, *"benchmarks/kernels.py --device cuda --budget 880 --out".split()]
    training = [python, *"benchmarks/training.py --device cuda --precision bf16 --budget 340 --out".split()]
    build = {"FASTWEIGHTS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": ""}
    has_fairseq = importlib.util.find_spec("fairseq") is not None
    return [
        # Twice the 10 to 20 minutes that one core, which may be the only one, takes for one architecture. No list of
        # architectures: containers come with one of all.
        Stage("build", [python, "tools/native_build.py"], 2400, build),
        Stage("environment", [python, "-m", "fairseq_fastweights.env", "--json"], 60),
        # The automatic choice, and then the tensor cores also at small sizes, where it would not take them.
        Stage("tests", tests, 1200, on_gpu),
        Stage("tests, chunked", [*tests, "-k", "native"], 900, {**on_gpu, "FASTWEIGHTS_CUDA_ALGORITHM": "chunked"}),
        *([Stage("models", [*pytest, *models, "-k", "on_a_gpu"], 600, on_gpu)] if has_fairseq else []),
        Stage("CUDA graph", [*exercise, "graph"], 120),
        Stage("determinism", [*exercise, "determinism"], 180),
        *(Stage(tool, [*sanitizer, tool, *exercise, "memory"], 900, own_memory) for tool in SANITIZERS),
        # At their limit both keep the results so far.
        Stage("kernels", [*benchmark, str(RESULTS / f"{device}-kernels.json")], 900),
        *([Stage("training", [*training, str(RESULTS / f"{device}-training.json")], 600)] if has_fairseq else []),
    ]


def run(stage: Stage, left: float, log: Path) -> dict[str, Any]:
    """Runs a stage, its output in the file `log`, for no longer than `left` seconds; returns its result.

    "status" is "passed", "failed" or "timed out", "summary" its last line of output.
    """
    if shutil.which(stage.command[0]) is None or left <= 0:
        reason = "no time was left for it" if left <= 0 else f"{stage.command[0]} is not on PATH"
        return {"status": "failed", "seconds": 0.0, "summary": reason}
    started = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment}
    with log.open("w") as file:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(stage.command, cwd=ROOT, env=environment, start_new_session=True, **quiet)
        try:
            status = "passed" if process.wait(min(stage.limit, left)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            # Processes that it started may outlive it, and would disturb the next stages.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or [""]
    if status != "passed":
        print("", *(f"    {line[:300]}" for line in lines[-25:]), sep="\n", flush=True)
    return {"status": status, "seconds": round(time.monotonic() - started, 1), "summary": lines[-1]}


def device_name() -> str:
    """The GPU's, as `nvidia-h200`. Raises `SystemExit`, with the reason, where there is nothing to check."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [""])[-1]
        raise SystemExit(f"error: {sys.executable} finds no GPU ({last}); name another Python with `make PYTHON=...`")
    return slug(result.stdout)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def check(plan: Sequence[Stage], results: Path, seconds: float) -> list[str]:
    """Runs all stages within so many seconds; returns the names of those that did not pass.

    Every result replaces an earlier one in the file `results` before the next stage begins.
    """
    deadline = time.monotonic() + seconds
    for folder in (WORK, results.parent):
        folder.mkdir(parents=True, exist_ok=True)
    bad = []
    for stage in plan:
        print(f"{stage.name} ...", end=" ", flush=True)
        outcome = run(stage, deadline - time.monotonic(), WORK / f"{slug(stage.name)}.log")
        print(f"{outcome['status']}, {outcome['seconds']:.0f} s: {outcome['summary'][:300]}", flush=True)
        bad += [stage.name] if outcome["status"] != "passed" else []
        # After each stage: a machine that is lent may be taken away at any time.
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        known = json.loads(results.read_text()) if results.exists() else {}
        known.setdefault("gpu check", {})[stage.name] = {"date": date, **outcome}
        new = results.with_suffix(".new")
        new.write_text(json.dumps(known, indent=1) + "\n")
        new.replace(results)
    return bad


def main(arguments: list[str] | None = None) -> int:
    """Checks, prints a summary, and returns the exit status."""
    names = [stage.name for stage in stages("")]
    parser = argparse.ArgumentParser(description="Builds, tests and measures on the GPU that is there.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="that it may take in all (default: any number)")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {'; '.join(names)} (default: all)")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:  # rejects NaN, too
        parser.error(f"--minutes is {options.minutes}; it must be positive")
    if unknown := set(options.stages) - set(names):
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; there are {'; '.join(names)}")
    device = device_name()
    chosen = [stage for stage in stages(device) if stage.name in (options.stages or names)]
    results = RESULTS / f"{device}.json"
    print(f"results go to {results.relative_to(ROOT)}", flush=True)
    bad = check(chosen, results, 60 * options.minutes)
    print(f"{len(chosen)} stages, {'not passed: ' + ', '.join(bad) if bad else 'all passed'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
