"""Puts mutants into the compiled kernels, one at a time, and counts those that the tests notice.

    python tools/kernel_mutation.py [cpu|cuda] [--sample 100] [--seed 1] [--files WORD] [--jobs N] [--minutes M]
                                    [--out FILE]

The mutants are universalmutator's (another operator, another number, a line or a condition left out), drawn from the
lines of `cpu/` and `cuda/`, one a line at most. Those of `cpu/` are compiled for the best instruction set of this
processor and tried against `tests/ops`; those of `cuda/` are compiled for the emulator and tried against `tests/cuda`:
against the tests that `make test-fast` runs first, then against the others. Mutants that do not compile, or that
compile to the same code, are not counted.

It can be done in pieces: what is in --out is not tried again, and after --minutes no other is begun. SURVIVORS has the
mutants that no test noticed, with the reason where the mutant is no fault; those are not tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import native_build
from native_toolchain import Torch

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "kernel-mutation"
SURVIVORS = ROOT / "tests" / "surviving_mutants.jsonl"
TESTS = {"cpu": "tests/ops", "cuda": "tests/cuda"}
MARKS = {"fast": "not slow and not emulated", "slow": "slow or emulated"}
LONGEST = 20 * 60
"""Seconds that a run of tests may take: a mutant that hangs is noticed."""
IGNORED = (r"^\s*(#|//|\*|using |namespace |template|static_assert|TORCH_)", r"^\s*[{}()\[\];,]*\s*$")
BUILD_EMULATED = "from tests.cuda.build import build; print(build())"


@dataclass(frozen=True)
class Mutant:
    """A line of a file, and what stands there instead."""

    path: str
    line: int
    text: str
    instead: str

    def apply(self, root: Path) -> None:
        path = root / self.path
        lines = path.read_text().splitlines(keepends=True)
        lines[self.line - 1] = f"{self.instead}\n"
        path.write_text("".join(lines))

    @property
    def change(self) -> tuple[str, str, str]:
        """The mutant wherever its line has moved to."""
        return self.path, self.text.strip(), self.instead.strip()


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    from universalmutator import mutator

    lines = path.read_text().splitlines(keepends=True)
    rules = ["universal.rules", "c_like.rules", "cpp.rules"]
    with contextlib.redirect_stdout(io.StringIO()):  # universalmutator prints its progress
        found = mutator.mutants_regexp(lines, ruleFiles=rules, ignorePatterns=list(IGNORED))
    for line, instead, *_ in found:
        yield Mutant(str(path.relative_to(ROOT)), line, lines[line - 1].rstrip("\n"), instead.rstrip("\n"))


def sample(part: str, word: str, seed: int) -> Iterator[Mutant]:
    """All lines of a part's files in a drawn order, each with one drawn mutant."""
    drawn, places = random.Random(seed), defaultdict(list)
    for path in sorted((ROOT / part).rglob("*.*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh") and word in str(path.relative_to(ROOT)):
            for mutant in mutants_of(path):
                places[mutant.path, mutant.line].append(mutant)
    for place in drawn.sample(sorted(places), len(places)):
        yield drawn.choice(places[place])


class CpuKernels:
    """Compiles the library with -O1, at a third of the time of -O3; what a mutant leaves as it is, is compiled once."""

    def __init__(self) -> None:
        self.plan = native_build.plan_cpu(Torch.find(), sanitize=False)
        code = "from fairseq_fastweights.ops import backends; print(backends.cpu_instruction_set())"
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        self.variant = f"kernels, {run.stdout.strip()}, "
        self.objects: dict[str, Path] = {}

    def build(self, copy: Path, mutant: Mutant | None) -> str:
        """Compiles a copy, and returns the library's path."""
        objects = dict(self.objects)
        changed = "binding" if mutant and mutant.path.endswith("binding.cpp") else self.variant
        for part in self.plan.compilations:
            if mutant is None or part.title.startswith(changed):
                objects[part.title] = copy / f"{'mutant' if mutant else 'whole'} {part.title}.o"
                source = copy / part.source.relative_to(ROOT)
                command = [*part.command, "-O1", "-w", "-c", str(source), "-o", str(objects[part.title])]
                subprocess.run(command, check=True, capture_output=True)
        if mutant is None:
            self.objects = objects
        library = copy / "mutant.so"
        link = [*self.plan.link, *map(str, objects.values()), *self.plan.link_libraries, "-o", str(library)]
        subprocess.run(link, check=True, capture_output=True)
        return str(library)


def build_emulated(copy: Path) -> str:
    """Compiles a copy's CUDA kernels for the emulator, and returns the library's path."""
    run = [sys.executable, "-c", BUILD_EMULATED]
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tools'}"}
    return subprocess.run(run, cwd=copy, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1]


class Bench:
    """A copy of the checkout, in which one mutant at a time is tried."""

    def __init__(self, number: int, part: str) -> None:
        self.copy, self.part = WORK / f"copy-{number}", part
        shutil.rmtree(self.copy, ignore_errors=True)
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "results")
        shutil.copytree(ROOT, self.copy, ignore=ignored)
        self.kernels = CpuKernels() if part == "cpu" else None
        self.whole = self.build(None)
        if (result := self.tried(None)) != "survived":
            raise SystemExit(f"error: {result} tests fail without a mutant: see {self.copy / 'output.txt'}")

    def build(self, mutant: Mutant | None) -> str:
        """Compiles the copy; returns a digest of the code."""
        self.library = self.kernels.build(self.copy, mutant) if self.kernels else build_emulated(self.copy)
        return hashlib.sha256(Path(self.library).read_bytes()).hexdigest()

    def outcome(self, mutant: Mutant) -> str:
        """The tests that notice it: "fast" ones, "slow" ones or none, "survived"; or why it is not counted."""
        source = (self.copy / mutant.path).read_bytes()
        try:
            mutant.apply(self.copy)
            return "same code" if self.build(mutant) == self.whole else self.tried(mutant)
        except subprocess.CalledProcessError:
            return "not compiled"
        finally:
            (self.copy / mutant.path).write_bytes(source)

    def tried(self, mutant: Mutant | None) -> str:
        paths = f"{self.copy}{os.pathsep}{self.copy / 'tools'}"
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        if self.kernels:
            environment["FASTWEIGHTS_NATIVE_CPU"] = self.library
        for kind, marks in list(MARKS.items())[: 2 if mutant else 1]:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks]
            with (self.copy / "output.txt").open("w") as output:
                try:
                    run = subprocess.run(
                        [*command, TESTS[self.part]],
                        cwd=self.copy,
                        env=environment,
                        stdout=output,
                        stderr=output,
                        timeout=LONGEST,
                    )
                except subprocess.TimeoutExpired:
                    return kind
            if run.returncode not in (0, 5):  # 5: none of these tests
                return kind
        return "survived"


def lines_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts the mutants of the compiled kernels that the tests notice.")
    parser.add_argument("parts", nargs="*", default=list(TESTS), help=f"of {', '.join(TESTS)} (default: both)")
    parser.add_argument("--sample", type=int, default=100, help="mutants of each part that count (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--files", default="", metavar="WORD", help="only mutants of files whose paths have it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials side by side")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other mutant after them")
    parser.add_argument("--out", type=Path, default=WORK / "mutants.jsonl", help="a line for each mutant")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    equivalent = {(line["path"], line["text"], line["instead"]) for line in lines_of(SURVIVORS) if line.get("reason")}
    done = {(line["path"], line["text"].strip(), line["instead"].strip()) for line in lines_of(options.out)}
    for part in options.parts:
        left = (x for x in sample(part, options.files, options.seed) if x.change not in equivalent | done)
        taking = threading.Lock()  # of a mutant, by one of the benches

        def found(part: str = part) -> tuple[int, ...]:
            outcomes = Counter(line["outcome"] for line in lines_of(options.out) if line["path"].startswith(f"{part}/"))
            return tuple(outcomes[name] for name in ("fast", "slow", "survived"))

        def work(bench: Bench, left: Iterator[Mutant] = left, taking: threading.Lock = taking) -> None:
            while sum(found(bench.part)) < options.sample and time.monotonic() < end:
                with taking:
                    mutant = next(left, None)
                if mutant is None:
                    break
                result = asdict(mutant) | {"outcome": bench.outcome(mutant)}
                with options.out.open("a") as out:
                    out.write(json.dumps(result) + "\n")
                if result["outcome"] == "survived":
                    print("survived:", *mutant.change, sep="\n    ", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(work, [Bench(number, part) for number in range(options.jobs)]))
        fast, slow, survived = found()
        print(
            f"{part}: of {fast + slow + survived} mutants fast tests notice {fast}, all tests {fast + slow}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
