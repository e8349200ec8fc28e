"""Puts faults into the package, one at a time, and counts those that the tests notice.

    python tools/mutation.py [--sample 400] [--seed 1] [--jobs N] [--out FILE] [--seconds 60] [--minutes M] [--again]
                             [FOLDER ...]

The faults are cosmic-ray's mutants (another operator, another number, a condition turned round, a loop that is not
entered, ...), drawn from the files of `fairseq_fastweights/` in proportion to what each folder offers. A mutant is
tried against the tests that run its line, as one run of the suite under coverage says: those of the same folder first,
those that `make test-fast` leaves out last. The parent of each trial has imported torch, fairseq and transformers, but
nothing of ours, and forks: a trial costs the import of the package and its tests alone.

It can be done in pieces: what is in --out is not tried again, the suite is recorded once, FOLDER restricts the drawn
mutants to some folders, and after --minutes no other is begun. Remove build/mutation/ where the package has changed.

The result, a line of JSON for each mutant, has the share that each folder's tests catch at its end, for fast tests and
for all. As tests are tried for a time that is limited, the shares are lower bounds. With `--again` what survived is
tried once more, with all tests of each file that runs its line or that names its file: processes of their own, and
copies of a module, do not show in coverage. More `--seconds` are for then.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
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
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fairseq_fastweights"
WORK = ROOT / "build" / "mutation"
FOLDERS = ("ops", "mixers", "models", "conversion", "data", "tasks", "integrations", "huggingface", "lm_eval", "files")
TESTS = (
    *(f"tests/{folder}" for folder in FOLDERS),
    *sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")),
    "tests/tools/test_native_build.py",
)
INSTANT = 0.05
"""Seconds: what importing the package takes is more."""
HEAVY = (
    *("torch", "torch._dynamo", "numpy", "pytest", "fairseq", "fairseq.tasks", "fairseq.models"),
    *("transformers", "transformers.trainer", "lm_eval.models.huggingface"),
)
LEFT_OUT = (
    # What they change is no fault, or one that no test should be asked to see.
    *("RemoveDecorator", "VariableInserter", "VariableReplacer"),
    # Python keeps small numbers and short names once: `is` finds what `==` does.
    *("Operator_Eq_Is.", "Operator_NotEq_IsNot."),
    # Numbers with a point have no such operators: whatever runs the line fails.
    *("_BitAnd", "_BitOr", "_BitXor", "_LShift", "_RShift"),
)


@dataclass(frozen=True)
class Mutant:
    """One fault: the `occurrence`-th place in `path` to which cosmic-ray's `operator` applies."""

    path: str
    line: int
    operator: str
    occurrence: int

    @property
    def folder(self) -> str:
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else Path(parts[1]).stem


def never_false(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The places of types, `assert` and `strict=`: they say what is known, so a change there is none."""
    nodes = list(ast.walk(ast.parse(source)))
    parts = [getattr(node, kind, None) for node in nodes for kind in ("annotation", "returns")]
    parts += [x for x in nodes if isinstance(x, ast.Assert) or (isinstance(x, ast.keyword) and x.arg == "strict")]
    return [((x.lineno, x.col_offset), (x.end_lineno, x.end_col_offset)) for x in parts if x is not None]


def mutants_of(root: Path, path: Path) -> Iterator[Mutant]:
    """All mutants of a file, but for those of what is never false."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = path.read_text()
    known = never_false(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(operator_names()):
        if any(word in f"{name}." for word in LEFT_OUT):
            continue
        operator = get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in known):
                yield Mutant(str(path.relative_to(root)), start[0], name, occurrence)


def mutated(source: str, mutant: Mutant) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return str(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence))


def is_python(source: str) -> bool:
    """True for Python: to cosmic-ray the star before arguments is an operator as any other."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def sample(root: Path, size: int, seed: int) -> list[Mutant]:
    """`size` mutants: of a folder as many as it has places that can be mutated, of a place one at most."""
    drawn = random.Random(seed)
    places: dict[tuple[str, int, str], list[Mutant]] = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        for mutant in mutants_of(root, path):
            # Each of the twelve other operators that may stand for a `+` is one chance of the same place.
            places[mutant.path, mutant.line, mutant.operator.split("_")[0]].append(mutant)
    chosen = (drawn.choice(places[place]) for place in drawn.sample(sorted(places), len(places)))
    faults = (mutant for mutant in chosen if is_python(mutated((root / mutant.path).read_text(), mutant)))
    return list(itertools.islice(faults, size))


@dataclass
class Suite:
    """Facts about the tests: which run a line, how long they take, which are slow."""

    by_line: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]
    slow: set[str]

    def of(self, mutant: Mutant, seconds: float, whole_files: bool) -> list[tuple[str, list[str]]]:
        """Attempts on a mutant: the fast tests of its own folder, the other fast ones, the slow ones, each for a time.

        What takes less than `INSTANT` comes first: most rows of tables of bad input do, and each may be the only one to
        notice. Then of each function the quickest case, so that a large table leaves time for the other functions.
        """
        lines = self.by_line.get(mutant.path, {})
        # Tables and definitions run at import, in no test: whoever runs anything in the file may see them.
        tests = lines.get(mutant.line) or set().union(*lines.values(), set())
        if whole_files:
            files, name = {test.partition("::")[0] for test in tests}, rf"\b{Path(mutant.path).stem}\b"
            every = {test: test.partition("::")[0] for test in self.seconds}
            naming = {file for file in set(every.values()) if re.search(name, (ROOT / file).read_text())}
            tests = {test for test, file in every.items() if file in files | naming}
        cases: dict[str, int] = defaultdict(int)
        ranks = {}
        for test in sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test)):
            ranks[test] = cases[test.partition("[")[0]]
            cases[test.partition("[")[0]] += 1
        near = (f"tests/{mutant.folder}/", f"tests/test_{mutant.folder}.py")
        chosen: dict[tuple[str, bool], list[str]] = {("fast", True): [], ("fast", False): [], ("slow", True): []}
        spent = dict.fromkeys(chosen, 0.0)

        def order(test: str) -> tuple[int, float, str]:
            seconds = self.seconds.get(test, 0.0)
            return -1 if seconds < INSTANT else ranks[test], seconds, test

        for test in sorted(tests, key=order):
            group = ("slow", True) if test in self.slow else ("fast", test.startswith(near))
            spent[group] += self.seconds.get(test, 0.0)
            if not chosen[group] or spent[group] < seconds:
                chosen[group].append(test)
        return [(kind, listed) for (kind, _), listed in chosen.items() if listed]


def record_suite() -> None:
    """Runs the tests once under coverage: what `Suite` is made from."""
    WORK.mkdir(parents=True, exist_ok=True)
    settings = WORK / "coveragerc"
    settings.write_text(f"[run]\nsource = {ROOT / PACKAGE}\ndata_file = {WORK / 'coverage'}\n")
    run = [sys.executable, "-m", "pytest", "-q", "-n", "auto", f"--junitxml={WORK / 'tests.xml'}"]
    run += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    if subprocess.run([*run, *TESTS], cwd=ROOT).returncode:
        (WORK / "tests.xml").unlink(missing_ok=True)
        raise SystemExit("the suite must pass before faults are put into what it tests")


def load_suite() -> Suite:
    from coverage import CoverageData

    data = CoverageData(str(WORK / "coverage"))
    data.read()
    by_line: dict[str, dict[int, set[str]]] = {}
    for name in data.measured_files():
        lines = data.contexts_by_lineno(name)
        by_line[str(Path(name).relative_to(ROOT))] = {
            line: {context.split("|")[0] for context in contexts if "::" in context} for line, contexts in lines.items()
        }
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(WORK / "tests.xml").iter("testcase"):
        if not case.get("classname"):  # a file that is skipped as a whole
            continue
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        seconds[test] = float(case.get("time", 0))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow", "-p", "no:cacheprovider", *TESTS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return Suite(by_line, seconds, {line for line in listed.splitlines() if "::" in line})


class Bench:
    """A copy of the checkout, in which one mutant at a time is tried."""

    def __init__(self, number: int) -> None:
        self.folder = WORK / f"copy-{number}"
        shutil.rmtree(self.folder, ignore_errors=True)
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "results")
        shutil.copytree(ROOT, self.folder, ignore=ignored, symlinks=True)
        self.sound: dict[str, bool] = {}

    def noticed(self, tests: list[str], limit: float, path: Path, original: str, fault: str) -> bool:
        """True if one of the tests fails, or does not end, with the mutant and passes without it."""
        tests = [test for test in tests if self.sound.get(test, True)]
        while tests:
            self.write(path, fault)
            passed = self.passes(tests, limit)
            self.write(path, original)
            if passed:
                return False
            failed = re.search(
                r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - |$)", (self.folder / "output.txt").read_text(), re.M
            )
            # Without a name the run did not get so far as to tell one: the package cannot be imported, or it hangs.
            if failed is None or failed[1] not in tests:
                return True
            if failed[1] not in self.sound:
                self.sound[failed[1]] = self.passes([failed[1]], limit)
            if self.sound[failed[1]]:
                return True
            tests.remove(failed[1])
        return False

    @staticmethod
    def write(path: Path, source: str) -> None:
        path.write_text(source)
        # Python tells old bytecode by the source's size and second, which two mutants may share.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink(missing_ok=True)

    def passes(self, tests: list[str], limit: float) -> bool:
        """True if these tests pass in time, in a fork that imports the package as it is in the copy."""
        listed = self.folder / "tests.args"
        listed.write_text("\n".join(tests))
        child = os.fork()
        if child == 0:
            os.setsid()
            # Of this process's own: on busy cores the clock says little. SIGXCPU ends it.
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
            os.chdir(self.folder)
            sys.path[:0] = [str(self.folder), str(self.folder / "tools")]
            os.environ["PYTHONPATH"] = f"{self.folder}{os.pathsep}{self.folder / 'tools'}"
            output = os.open(str(self.folder / "output.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = 1
            try:
                pytest = importlib.import_module("pytest")
                status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"@{listed}"]))
            finally:
                os._exit(status)
        deadline = time.monotonic() + 10 * limit
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status == 0
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False

    def outcome(self, mutant: Mutant, tries: list[tuple[str, list[str]]], limit: float) -> str:
        """The tests that notice the mutant: "fast" ones, "slow" ones, or none ("survived", "not run")."""
        path = self.folder / mutant.path
        original = path.read_text()
        for kind, tests in tries:
            if self.noticed(tests, limit, path, original, mutated(original, mutant)):
                return kind
        return "survived" if tries else "not run"


def difference(mutant: Mutant) -> str:
    """The first line that the mutant changes, before and after."""
    before = (ROOT / mutant.path).read_text()
    pairs = zip(before.splitlines(), mutated(before, mutant).splitlines(), strict=False)
    return next((f"{a.strip()}  ->  {b.strip()}" for a, b in pairs if a != b), "")


def shares(results: list[dict[str, object]]) -> str:
    """A table: of each folder's mutants, the share that fast tests catch and that all do."""
    rows = ["| folder | mutants | caught by fast tests | by all |", "| --- | --- | --- | --- |"]
    folders: dict[str, list[object]] = defaultdict(list)
    for result in results:
        folders[str(result["folder"])].append(result["outcome"])
        folders["all"].append(result["outcome"])
    for folder in sorted(folders, key=lambda name: (name == "all", name)):
        outcomes = folders[folder]
        fast = sum(outcome == "fast" for outcome in outcomes)
        caught = fast + sum(outcome == "slow" for outcome in outcomes)
        rows.append(f"| {folder} | {len(outcomes)} | {fast / len(outcomes):.0%} | {caught / len(outcomes):.0%} |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts the faults in the package that the tests notice.")
    parser.add_argument("folders", nargs="*", help="of fairseq_fastweights/; all, unless some are named")
    parser.add_argument("--sample", type=int, default=400, help="how many mutants are tried (default: 400)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials side by side")
    parser.add_argument("--out", type=Path, default=WORK / "mutants.jsonl", help="a line for each mutant")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other mutant after them")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of tests, by their own record, for each of three tries"
    )
    parser.add_argument("--again", action="store_true", help="try what survived once more, with whole files of tests")
    options = parser.parse_args(arguments)
    if not (options.minutes > 0 and options.seconds > 0):  # nor is NaN
        parser.error(f"--minutes is {options.minutes} and --seconds {options.seconds}; both must be positive")
    end = time.monotonic() + 60 * options.minutes
    if not (WORK / "tests.xml").exists():
        record_suite()
    suite = load_suite()
    mutants = sample(ROOT, options.sample, options.seed)
    mutants = [mutant for mutant in mutants if not options.folders or mutant.folder in options.folders]
    if options.again:
        kept = [
            line for line in options.out.read_text().splitlines() if json.loads(line)["outcome"] in ("fast", "slow")
        ]
        options.out.write_text("".join(f"{line}\n" for line in kept))
    options.out.touch()
    done = {tuple(json.loads(line)["mutant"].values()) for line in options.out.read_text().splitlines()}
    left = [mutant for mutant in mutants if tuple(asdict(mutant).values()) not in done]
    print(f"{len(mutants)} mutants, {len(left)} of them to try", flush=True)
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    for name in HEAVY:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)

    def work(number: int) -> None:
        bench = Bench(number)
        for mutant in left[number :: options.jobs]:
            started = time.monotonic()
            if started > end:
                break
            result: dict[str, object] = {"mutant": asdict(mutant), "folder": mutant.folder}
            tries = suite.of(mutant, options.seconds, options.again)
            # A trial that computes for so long, or waits ten times as long, hangs.
            outcome = bench.outcome(mutant, tries, 60 + options.seconds)
            result |= {"outcome": outcome, "change": difference(mutant)}
            result["seconds"] = round(time.monotonic() - started, 1)
            with options.out.open("a") as out:
                out.write(json.dumps(result) + "\n")

    # Processes and no threads, as each of them forks.
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(number,)) for number in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker failed; what it printed says why. What was tried is kept, another run goes on there")
    results = [json.loads(line) for line in options.out.read_text().splitlines()]
    for result in results:
        if result["outcome"] in ("survived", "not run"):
            print(f"{result['outcome']}: {result['mutant']['path']}:{result['mutant']['line']}: {result['change']}")
    print(shares(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
