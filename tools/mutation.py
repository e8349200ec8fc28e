"""Changes the package and the compiled kernels by mutants, one at a time, and counts those that the tests notice.

    python tools/mutation.py [package|cpu|cuda ...] [--files WORD] [--sample 100] [--seed 1] [--jobs N]
                             [--seconds 120] [--minutes M] [--out FILE]

The mutants are universalmutator's (another operator, another number, a line or a condition left out), drawn from the
lines of a part, one a line at most. A mutant of the package is tried against the tests of its folder, those of files
that name its module first; one of `cpu/` is compiled for the best instruction set of this processor and tried against
`tests/ops`; one of `cuda/` is compiled for the emulator and tried against `tests/cuda`: in each case against the tests
that `make test-fast` runs, then against the others. Of each test function one case comes first, then a second one, and
so on, for --seconds of CPU time: the shares are lower bounds. Mutants that do not compile, or that compile to the same
code, are not counted; in Python changes of docstrings, types, `assert` and `strict=` count as the same code.

The parent of each trial has imported torch, fairseq and transformers, but not the package, and forks. It can be done in
pieces: mutants in --out are not tried again, and after --minutes no other is begun. SURVIVORS has mutants that no test
noticed, with the reason where the mutant is no fault; those are not tried again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import native_build
from native_toolchain import Torch

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutation"
SURVIVORS = ROOT / "tests" / "surviving_mutants.jsonl"
HEAVY = (
    *("torch", "torch._dynamo", "numpy", "pytest", "fairseq", "fairseq.tasks", "fairseq.models"),
    *("transformers", "transformers.trainer", "lm_eval.models.huggingface"),
)
MARKS = {"fast": "not slow and not emulated", "slow": "slow or emulated"}
IGNORED = (r"^\s*(#|//|\*|using |namespace |template|static_assert|TORCH_)", r"^\s*[{}()\[\];,]*\s*$")
BUILD_EMULATED = "from tests.cuda.build import build; print(build())"


class Part(NamedTuple):
    """A folder, the endings of its files, universalmutator's rules and the tests."""

    folder: str
    suffixes: tuple[str, ...]
    rules: tuple[str, ...]
    tests: str


_CPP = ("universal.rules", "c_like.rules", "cpp.rules")
PARTS = {
    "package": Part("fairseq_fastweights", (".py",), ("universal.rules", "python.rules"), "tests"),
    "cpu": Part("cpu", (".h", ".cpp"), _CPP, "tests/ops"),
    "cuda": Part("cuda", (".h", ".cpp", ".cu", ".cuh"), _CPP, "tests/cuda"),
}


@dataclass(frozen=True)
class Mutant:
    """A change of a file: `instead` replaces the `text` of a line."""

    path: str
    line: int
    text: str
    instead: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The mutant wherever its line has moved to."""
        return self.path, self.text.strip(), self.instead.strip()

    def apply(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        lines[self.line - 1] = f"{self.instead}\n"
        return "".join(lines)


def sample(part: Part, word: str, seed: int) -> Iterator[Mutant]:
    """All lines of a part's files in a drawn order, each with one drawn mutant."""
    from universalmutator import mutator

    drawn, places = random.Random(seed), defaultdict(list)
    for path in sorted((ROOT / part.folder).rglob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in part.suffixes or word not in name:
            continue
        lines = path.read_text().splitlines(keepends=True)
        with contextlib.redirect_stdout(io.StringIO()):  # universalmutator prints its progress
            found = mutator.mutants_regexp(lines, ruleFiles=list(part.rules), ignorePatterns=list(IGNORED))
        for line, instead, *_ in found:
            places[name, line].append(Mutant(name, line, lines[line - 1].rstrip("\n"), instead.rstrip("\n")))
    yield from (drawn.choice(places[place]) for place in drawn.sample(sorted(places), len(places)))


def behaviour(source: str) -> str:
    """The syntax tree of a module without docstrings, types, `assert` and `strict=`. Raises `SyntaxError`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in {"annotation", "returns"} & set(node._fields):
            setattr(node, name, None)
        if isinstance(node, ast.keyword) and node.arg == "strict":
            node.value = ast.Constant(True)
        elif isinstance(node, ast.Assert):
            node.test, node.msg = ast.Constant(True), None
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    compile(source, "", "exec")  # finds a `break` outside of a loop, too
    return ast.dump(tree)


class Order:
    """pytest's plugin: one case of each function, then a second one ..., files that name a module first; for a time."""

    def __init__(self, module: str, seconds: float) -> None:
        self.pattern, self.seconds = re.compile(rf"\b{module}\b"), seconds

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        names = {path: bool(self.pattern.search(path.read_text())) for path in {item.path for item in items}}
        cases, ranks = Counter[str](), {}
        for item in items:
            function = item.nodeid.partition("[")[0]
            ranks[item] = not names[item.path], cases[function]
            cases[function] += 1
        items.sort(key=ranks.__getitem__)
        self.end = time.process_time() + self.seconds

    def pytest_runtest_setup(self, item: Any) -> None:
        if time.process_time() > self.end:
            item.session.shouldstop = "the time is up"


class Copy:
    """A copy of the checkout, in which tests run, with the CPU kernels of `library` if that is named."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self.library = folder, folder / "output.txt", ""
        shutil.rmtree(folder, ignore_errors=True)
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "results")
        shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
        (folder / "build").mkdir()
        (folder / "build" / "native").symlink_to(ROOT / "build" / "native")  # objects, by all that they are made from

    def write(self, name: str, source: str) -> None:
        path = self.folder / name
        path.write_text(source)
        # Python tells old bytecode by the source's size and second, which two mutants may share.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink(missing_ok=True)

    def failing(self, arguments: Sequence[str], order: Order, limit: float) -> str | None:
        """The first test that fails, by a pytest in a fork; "" if it ends, or hangs, without one; None if all pass."""
        child = os.fork()
        if child == 0:
            os.setsid()
            # CPU time, as a busy machine slows the clock's; SIGXCPU ends the process.
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
            os.chdir(self.folder)
            sys.path[:0] = paths = [str(self.folder), str(self.folder / "tools")]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            if self.library:
                os.environ["FASTWEIGHTS_NATIVE_CPU"] = self.library
            output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = 1
            try:
                flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
                status = int(importlib.import_module("pytest").main([*flags, *arguments], plugins=[order]))
            finally:
                os._exit(status)
        deadline = time.monotonic() + limit + 600  # for tests that wait and compute nothing
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
        if found := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", self.output.read_text(errors="replace"), re.M):
            return found[1]
        # 2: the time was up; 5: there is no test with these marks.
        return None if os.waitstatus_to_exitcode(ended[1]) in (0, 2, 5) else ""


class Bench:
    """Two copies of the checkout: one for mutants, one to see whether a test fails without a mutant, too."""

    def __init__(self, number: int, part: str, seconds: float) -> None:
        self.part, self.seconds = part, seconds
        self.copy, self.clean = (Copy(WORK / f"{part}-{kind}-{number}") for kind in ("mutant", "clean"))
        self.kernels = CpuKernels() if part == "cpu" else None
        self.unsound: set[str] = set()
        self.digest = self.build(None)
        self.clean.library = shutil.copy(self.copy.library, str(self.clean.folder)) if self.kernels else ""

    def build(self, mutant: Mutant | None) -> str:
        """Compiles the copy; returns a digest of the code. Raises `SyntaxError` or `CalledProcessError`."""
        if self.part == "package":
            return behaviour((self.copy.folder / mutant.path).read_text()) if mutant else ""
        library = (self.kernels.build if self.kernels else build_emulated)(self.copy.folder, mutant)
        self.copy.library = library if self.kernels else ""
        return hashlib.sha256(Path(library).read_bytes()).hexdigest()

    def outcome(self, mutant: Mutant) -> str:
        """The tests that notice it: "fast" ones, "slow" ones or none, "survived"; or why it is not counted."""
        source = (self.copy.folder / mutant.path).read_text()
        try:
            self.copy.write(mutant.path, mutant.apply(source))
            before = behaviour(source) if self.part == "package" else self.digest
            if self.build(mutant) == before:
                return "same code"
            return next((kind for kind in MARKS if self.is_noticed(mutant, kind)), "survived")
        except (SyntaxError, subprocess.CalledProcessError):
            return "not compiled"
        finally:
            self.copy.write(mutant.path, source)

    def is_noticed(self, mutant: Mutant, kind: str) -> bool:
        """True if a test of this kind fails, or does not end, with the mutant and passes without it."""
        order = Order(Path(mutant.path).stem, self.seconds)
        while True:
            unsound = [f"--deselect={test}" for test in sorted(self.unsound)]
            words = [*self.tests_of(mutant), "-m", MARKS[kind], *unsound]
            test = self.copy.failing(words, order, 3 * self.seconds + 60)
            if test is None:
                return False
            if not test or self.clean.failing([test], order, 600) is None:
                return True
            self.unsound.add(test)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests of its folder, or of the file that is called after its module."""
        _, folder, *_ = Path(mutant.path).parts
        near = [f"tests/{folder}", f"tests/test_{Path(folder).stem}.py"] if self.part == "package" else []
        return [name for name in near if (ROOT / name).exists()] or [PARTS[self.part].tests]


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
        self.objects = self.objects or objects
        library = copy / "mutant.so"
        link = [*self.plan.link, *map(str, objects.values()), *self.plan.link_libraries, "-o", str(library)]
        subprocess.run(link, check=True, capture_output=True)
        return str(library)


def build_emulated(copy: Path, _: Mutant | None) -> str:
    """Compiles a copy's CUDA kernels for the emulator, and returns the library's path."""
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tools'}"}
    command = [sys.executable, "-c", BUILD_EMULATED]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def try_all(options: argparse.Namespace, part: str, left: Sequence[Mutant], enough: Callable[[], bool]) -> None:
    """Records the outcome of each mutant, until there are enough or the time is up."""

    def work(number: int) -> None:
        bench = Bench(number, part, options.seconds)
        for mutant in left[number :: options.jobs]:
            started = time.monotonic()
            if started > options.end or enough():
                break
            outcome = bench.outcome(mutant)
            result = asdict(mutant) | {"outcome": outcome, "seconds": round(time.monotonic() - started, 1)}
            with options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            if outcome == "survived":
                print(
                    f"{mutant.path}:{mutant.line}",
                    mutant.text.strip(),
                    mutant.instead.strip(),
                    sep="\n    ",
                    flush=True,
                )

    # Each worker forks, which threads may not.
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(number,)) for number in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(f"a worker failed, as printed above; {options.out} has the trials so far, for another run")


def shares(results: Sequence[dict[str, Any]]) -> str:
    """A table: of each folder's mutants, the share that fast tests notice and that all do."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        if result["outcome"] in (*MARKS, "survived"):
            folders["/".join(Path(result["path"]).parts[:2])][result["outcome"]] += 1
    rows = ["| folder or file | mutants | noticed by fast tests | by all |", "| --- | ---: | ---: | ---: |"]
    for folder, found in sorted(folders.items()):
        shown = (f"{noticed / found.total():.0%}" for noticed in (found["fast"], found["fast"] + found["slow"]))
        rows.append(f"| {folder} | {found.total()} | {' | '.join(shown)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts the mutants that the tests notice.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--files", default="", metavar="WORD", help="only mutants of files whose paths have it")
    parser.add_argument("--sample", type=int, default=100, help="mutants of each part (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials side by side")
    parser.add_argument(
        "--seconds", type=float, default=120, help="CPU time of fast tests, and of others (default: 120)"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other mutant after them")
    parser.add_argument("--out", type=Path, default=WORK / "mutants.jsonl", help="a line for each mutant")
    options = parser.parse_args(arguments)
    for name in ("seconds", "minutes"):
        if not getattr(options, name) > 0:  # rejects NaN, too
            parser.error(f"--{name} is {getattr(options, name)}; it must be positive")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"PART is {min(unknown)}; it must be one of {', '.join(PARTS)}")
    options.end = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    for name in HEAVY:  # once for all forks, which import only the package itself
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    known = [line for line in lines_of(SURVIVORS) if line.get("reason")] + lines_of(options.out)
    done = {Mutant(*(line[name] for name in ("path", "line", "text", "instead"))).key for line in known}
    for part in options.parts or PARTS:

        def enough(start: str = f"{PARTS[part].folder}/") -> bool:
            tried = (line for line in lines_of(options.out) if line["path"].startswith(start))
            return sum(line["outcome"] in (*MARKS, "survived") for line in tried) >= int(options.sample)

        left = [mutant for mutant in sample(PARTS[part], options.files, options.seed) if mutant.key not in done]
        try_all(options, part, left, enough)
    print(shares(lines_of(options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
