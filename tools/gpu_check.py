"""Checks the compiled kernels on a GPU, unattended, for `make gpu-check`.

    python tools/gpu_check.py [--minutes 9] [--out FOLDER] [--rehearse] [STAGE ...]

Builds the kernels for this machine's GPU unless they are there (built elsewhere, even), and takes the most important
stages first: operations and layers against the float64 reference, kernels beside flash-linear-attention, trainings
plain, compiled and replayed, CUDA graphs, determinism, races; then the remaining tests and sanitizers. It needs CUDA's
compiler, or built kernels, a torch with CUDA, fairseq and pytest, and no network. Each stage has a time limit, and none
stops the others. On a machine lent for minutes, --minutes ends the run in time: a stage may take what the later ones
have not reserved. Another run can have some stages only. Results go to FOLDER (``benchmarks/results``) as they come:
``<device>.json``, whose other contents stay, the measurements, and the output of each stage in ``logs``. --rehearse
runs the stages on the CPU, tiny and by the CPU kernels, to find what is missing before a GPU is there; it leaves out
the build, CUDA graphs, models' tests and larger models, with a line for each. The exit status is 1 if a stage failed.
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
PARTS = ("--parts", "lm-small", "lm-small-long", "lm-medium", "baevski", "wmt-big")
BUDGET = "seconds that it may take"  # stands in a command for their number
# Kernels that were built elsewhere need no compiler here.
READY = (
    "from fairseq_fastweights.ops import libraries; why = libraries.load('cuda'); print(why or 'CUDA kernels: ready')"
)
READY += "; raise SystemExit(why is not None)"


class Stage(NamedTuple):
    """A command that may take `limit` seconds, or the time left if that is less; `reserved` are kept for it."""

    name: str
    command: Sequence[str]
    limit: float
    environment: dict[str, str] = {}
    reserved: float = 10


def stages(device: str, out: Path = RESULTS, rehearse: bool = False) -> list[Stage]:
    """The stages, in this order. The limits end stages that hang; each is several times the usual time."""
    python = sys.executable
    # The reference that results are held against takes cores; but each process takes memory of the GPU for itself.
    parallel = ["-n", str(min(10, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *([] if rehearse else parallel)]
    # A rehearsal runs one test of each kind, by the CPU kernels.
    few = " and sum and float32 and not bfloat16" if rehearse else ""
    kind = "cpu" if rehearse else "cuda"
    on_gpu = {"FASTWEIGHTS_TEST_DEVICE": kind, "OMP_NUM_THREADS": "1"}
    chunked = {**on_gpu, "FASTWEIGHTS_CUDA_ALGORITHM": "chunked"}
    layers = ["tests/ops/test_elementwise.py", "tests/mixers/test_short_convolution.py"]
    models = ["tests/tasks/test_on_a_gpu.py", "tests/examples/test_synthetic.py", "-k", "on_a_gpu"]
    exercise = [python, "tools/gpu_exercise.py", "--device", kind]
    # compute-sanitizer lies beside nvcc, which need not be on PATH.
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), *(f"{home}/bin" for home in homes if home)])
    sanitizer = [shutil.which("compute-sanitizer", path=places) or "compute-sanitizer", "--error-exitcode", "86"]
    sanitizer += ["--print-limit", "20", "--tool"]
    # torch's allocator would hide accesses out of bounds within its blocks, and reuse memory that one call has written:
    # each tensor gets memory of its own.
    own_memory = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    sizes = ["--quick"] if rehearse else []
    kernels = [python, "benchmarks/kernels.py", "--device", kind, *sizes, "--budget", BUDGET, "--out"]
    training = [python, "benchmarks/training.py", "--device", kind, "--precision", "bf16", *sizes, "--budget", BUDGET]
    build = {"FASTWEIGHTS_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": ""}

    def watched(tool: str, reserved: float) -> Stage:
        command = [] if rehearse else [*sanitizer, tool]
        return Stage(tool, [*command, *exercise, "memory"], 900, own_memory, reserved)

    found = [
        # Twice the 10 to 20 minutes that one core, which may be the only one, takes for one architecture. No list of
        # architectures: containers come with one of all.
        Stage("build", ["sh", "-c", f'{python} -c "{READY}" || {python} tools/native_build.py'], 2400, build),
        Stage("environment", [python, "-m", "fairseq_fastweights.env", "--json"], 60),
        Stage("operations", [*pytest, "tests/ops/test_backends.py", "-k", "native" + few], 300, on_gpu, 60),
        Stage("layers", [*pytest, *layers, *(["-x", "-k", "float32"] if rehearse else [])], 300, on_gpu, 60),
        # At their limit both keep the results so far.
        Stage("kernels", [*kernels, str(out / f"{device}-kernels.json")], 900, reserved=150),
        Stage("training", [*training, "--out", str(out / f"{device}-training.json"), *PARTS[:2]], 600, reserved=120),
        Stage("CUDA graph", [*exercise, "graph"], 120, reserved=20),
        Stage("determinism", [*exercise, "determinism"], 180, reserved=20),
        watched("racecheck", 60),
        # The automatic choice, and then the tensor cores also at small sizes, where it would not take them.
        Stage("tests", [*pytest, "tests/ops", "-k", "native" + few], 1200, on_gpu),
        Stage("tests, chunked", [*pytest, "tests/ops", "-k", "native" + few], 900, chunked),
        Stage("models", [*pytest, *models], 600, on_gpu),
        Stage(
            "larger models",
            [*training, "--out", str(out / f"{device}-training-larger.json"), PARTS[0], *PARTS[2:]],
            600,
        ),
        *(watched(tool, 10) for tool in ("memcheck", "initcheck", "synccheck")),
    ]
    # What a CPU has not: nvcc's kernels, a graph, tests that are for a GPU alone.
    return [x for x in found if not rehearse or x.name not in ("build", "CUDA graph", "models", "larger models")]


def run(stage: Stage, left: float, log: Path) -> dict[str, Any]:
    """Runs a stage, its output in the file `log`, for no longer than `left` seconds; returns its result.

    "status" is "passed", "failed" or "timed out", "summary" its last line of output.
    """
    if shutil.which(stage.command[0]) is None or left <= 0:
        reason = "no time was left for it" if left <= 0 else f"{stage.command[0]} is not on PATH"
        return {"status": "failed", "seconds": 0.0, "summary": reason}
    started = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment}
    seconds = min(stage.limit, left)
    # A benchmark that knows its time ends before it is stopped.
    command = [str(max(10, int(0.95 * seconds) - 10)) if word == BUDGET else word for word in stage.command]
    with log.open("w") as file:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **quiet)
        try:
            status = "passed" if process.wait(seconds) == 0 else "failed"
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
    logs = results.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    bad = []
    for index, stage in enumerate(plan):
        print(f"{stage.name} ...", end=" ", flush=True)
        left = deadline - time.monotonic()
        kept = sum(later.reserved for later in plan[index + 1 :])
        outcome = run(stage, min(left, max(left - kept, stage.reserved)), logs / f"{slug(stage.name)}.log")
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
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--rehearse", action="store_true", help="run the stages on the CPU, tiny")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {'; '.join(names)} (default: all)")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:  # rejects NaN, too
        parser.error(f"--minutes is {options.minutes}; it must be positive")
    if unknown := set(options.stages) - set(names):
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; there are {'; '.join(names)}")
    device, out = "cpu" if options.rehearse else device_name(), options.out.resolve()
    if options.rehearse and out == RESULTS:
        parser.error("--rehearse needs --out FOLDER: benchmarks/results is for measurements")
    planned = stages(device, out, options.rehearse)
    chosen = [stage for stage in planned if stage.name in (options.stages or names)]
    for name in [name for name in options.stages or names if name not in [stage.name for stage in planned]]:
        print(f"{name}: left out, a rehearsal has no GPU")
    results = out / f"{device}.json"
    print(f"results go to {results}", flush=True)
    bad = check(chosen, results, 60 * options.minutes)
    print(f"{len(chosen)} stages, {'not passed: ' + ', '.join(bad) if bad else 'all passed'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
