"""Changes the compiled kernels by mutants, one at a time, and counts those that the tests notice.

    python tools/kernel_mutation.py [cpu|cuda] [--sample 100] [--seed 1] [--files WORD] [--jobs N] [--minutes M]
                                    [--out FILE]

The mutants are universalmutator's (another operator, another number, a line or a condition left out), drawn from the
lines of `cpu/` and `cuda/`, one a line at most. Those of `cpu/` are compiled for the best instruction set of this
processor and tried against `tests/ops`; those of `cuda/` are compiled for the emulator and tried against `tests/cuda`:
against the tests that `make test-fast` runs first, then against the others. Mutants that do not compile, or that
compile to the same code, are not counted.

It can be done in pieces: mutants in --out are not tried again, and after --minutes no other is begun. SURVIVORS has
the mutants that no test noticed, with the reason where the mutant is no fault; those are not tried again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import mutants
import native_build
from mutants import ROOT, Mutant, lines_of, try_all
from native_toolchain import Torch

WORK = ROOT / "build" / "kernel-mutation"
SURVIVORS = ROOT / "tests" / "surviving_mutants.jsonl"
TESTS = {"cpu": "tests/ops", "cuda": "tests/cuda"}
MARKS = {"fast": "not slow and not emulated", "slow": "slow or emulated"}
LONGEST = 20 * 60
"""Seconds of CPU time that a run of tests may take: a mutant that hangs is noticed."""
IGNORED = (r"^\s*(#|//|\*|using |namespace |template|static_assert|TORCH_)", r"^\s*[{}()\[\];,]*\s*$")
BUILD_EMULATED = "from tests.cuda.build import build; print(build())"


def change(path: str, text: str, instead: str) -> tuple[str, str, str]:
    """A mutant wherever its line has moved to."""
    return path, text.strip(), instead.strip()


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a file."""
    from universalmutator import mutator

    lines = path.read_text().splitlines(keepends=True)
    rules = ["universal.rules", "c_like.rules", "cpp.rules"]
    with contextlib.redirect_stdout(io.StringIO()):  # universalmutator prints its progress
        found = mutator.mutants_regexp(lines, ruleFiles=rules, ignorePatterns=list(IGNORED))
    for line, instead, *_ in found:
        yield Mutant(str(path.relative_to(ROOT)), line, lines[line - 1].rstrip("\n"), instead.rstrip("\n"))


def sample(part: str, word: str, seed: int) -> list[Mutant]:
    """All lines of a part's files in a drawn order, each with one drawn mutant."""
    drawn, places = random.Random(seed), defaultdict(list)
    for path in sorted((ROOT / part).rglob("*.*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh") and word in str(path.relative_to(ROOT)):
            for mutant in mutants_of(path):
                places[mutant.path, mutant.line].append(mutant)
    return [drawn.choice(places[place]) for place in drawn.sample(sorted(places), len(places))]


class CpuKernels:
    """Compiles the library with -O1, at a third of the time of -O3; others than a mutant's are compiled once."""

    def __init__(self) -> None:
        self.plan = native_build.plan_cpu(Torch.find(), sanitize=False)
        code = "from fairseq_fastweights.ops import backends; print(backends.cpu_instruction_set())"
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        self.variant = f"kernels, {run.stdout.strip()}, "
        self.objects: dict[str, Path] = {}

    def build(self, copy: Path, mutant: Mutant | None) -> str:
        """Compiles a copy, and returns the library's path."""
        objects = dict(self.objects)
        # Other files than these sources are included by the kernels, which are compiled for each number type.
        stem = Path(mutant.path).stem if mutant else ""
        changed = stem if stem in ("binding", "dispatch", "steps_binding") else self.variant
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


class Bench(mutants.Bench):
    """A copy of the checkout, whose kernels are compiled once without a mutant."""

    def __init__(self, number: int, part: str) -> None:
        super().__init__(WORK / f"copy-{number}")
        self.part, self.kernels = part, CpuKernels() if part == "cpu" else None
        self.whole = self.build(None)
        if self.noticing(["fast"]) != "survived":
            raise SystemExit(f"error: fast tests fail without a mutant: see {self.output}")

    def build(self, mutant: Mutant | None) -> str:
        """Compiles the copy; returns a digest of the code."""
        self.library = self.kernels.build(self.copy, mutant) if self.kernels else build_emulated(self.copy)
        return hashlib.sha256(Path(self.library).read_bytes()).hexdigest()

    def outcome(self, mutant: Mutant) -> str:
        """The tests that notice it: "fast" ones, "slow" ones or none, "survived"; or why it is not counted."""
        path = self.copy / mutant.path
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        lines[mutant.line - 1] = f"{mutant.instead}\n"
        try:
            path.write_text("".join(lines))
            return "same code" if self.build(mutant) == self.whole else self.noticing(MARKS)
        except subprocess.CalledProcessError:
            return "not compiled"
        finally:
            path.write_text(source)

    def noticing(self, kinds: Iterable[str]) -> str:
        """The first kind of tests that fail, or "survived"."""
        environment = {"FASTWEIGHTS_NATIVE_CPU": self.library} if self.kernels else {}
        failing = (x for x in kinds if not self.passes(["-m", MARKS[x], TESTS[self.part]], LONGEST, **environment))
        return next(failing, "survived")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts the mutants of the compiled kernels that the tests notice.")
    parser.add_argument("parts", nargs="*", default=list(TESTS), help=f"of {', '.join(TESTS)} (default: both)")
    parser.add_argument("--files", default="", metavar="WORD", help="only mutants of files whose paths have it")
    options = mutants.parse(parser, arguments, 100, WORK / "mutants.jsonl")  # a sample of each part
    # Lines may have moved since, so that a mutant is known by its text.
    known = [line for line in lines_of(SURVIVORS) if line.get("reason")] + lines_of(options.out)
    done = {change(line["path"], line["text"], line["instead"]) for line in known}
    for part in options.parts:
        drawn = sample(part, options.files, options.seed)
        left = [mutant for mutant in drawn if change(mutant.path, mutant.text, mutant.instead) not in done]

        def counts(part: str = part) -> list[int]:
            outcomes = Counter(line["outcome"] for line in lines_of(options.out) if line["path"].startswith(f"{part}/"))
            return [outcomes[name] for name in ("fast", "slow", "survived")]

        def trials(number: int, part: str = part) -> Callable[[Mutant], str]:
            return Bench(number, part).outcome

        def enough(counts: Callable[[], list[int]] = counts) -> bool:
            return sum(counts()) >= int(options.sample)

        try_all(options, left, trials, enough)
        fast, slow, survived = counts()
        print(f"{part}: of {fast + slow + survived} mutants fast tests notice {fast}, all tests {fast + slow}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
