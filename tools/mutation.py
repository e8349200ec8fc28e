"""Changes the package by mutants, one at a time, and counts those that the tests notice.

    python tools/mutation.py [--sample 400] [--seed 1] [--jobs N] [--out FILE] [--seconds 60] [--minutes M] [FOLDER ...]

The mutants are cosmic-ray's (another operator, another number, a condition turned round, a loop that is not entered,
...), drawn from the files of `fairseq_fastweights/` in proportion to the size of each folder. A mutant is tried against
the tests that run its line, as one run of the suite under coverage says, then those of the same files and of files that
name its module: processes of their own, and copies of a module, do not show in coverage. The tests of the same folder
come first, those that `make test-fast` leaves out last. The parent of each trial has imported torch, fairseq and
transformers, but not the package, and forks: a trial costs the import of the package and its tests alone.

It can be done in pieces: mutants in --out are not tried again, the suite is recorded once, FOLDER restricts the drawn
mutants to some folders, and after --minutes no other is begun. Remove build/mutation/ where the package has changed.

The result, a line of JSON for each mutant, has the share that each folder's tests catch at its end, for fast tests and
for all. As tests are tried for a limited time, --seconds, the shares are lower bounds.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mutants
from mutants import ROOT, lines_of, try_all

PACKAGE = "fairseq_fastweights"
WORK = ROOT / "build" / "mutation"
FOLDERS = ("ops", "mixers", "models", "conversion", "data", "tasks", "integrations", "huggingface", "lm_eval", "files")
TESTS = (
    *(f"tests/{folder}" for folder in FOLDERS),
    *sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")),
    "tests/tools/test_native_build.py",
)
INSTANT = 0.05
"""Seconds, less than the import of the package takes."""
LEFT_OUT = (
    # Their changes are no faults, or none that a test should see.
    *("RemoveDecorator", "VariableInserter", "VariableReplacer"),
    # Python keeps small numbers and short names once: `is` finds the same as `==`.
    *("Operator_Eq_Is.", "Operator_NotEq_IsNot."),
    # Numbers with a point have no such operators: whatever runs the line fails.
    *("_BitAnd", "_BitOr", "_BitXor", "_LShift", "_RShift"),
)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """The `occurrence`-th place of a file to which cosmic-ray's `operator` applies."""

    operator: str
    occurrence: int

    @property
    def folder(self) -> str:
        return folder_of(self.path)


def folder_of(path: str) -> str:
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else Path(parts[1]).stem


def never_false(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The places of types, `assert` and `strict=`: a change there is no fault."""
    nodes = list(ast.walk(ast.parse(source)))
    parts = [getattr(node, kind, None) for node in nodes for kind in ("annotation", "returns")]
    parts += [x for x in nodes if isinstance(x, ast.Assert) or (isinstance(x, ast.keyword) and x.arg == "strict")]
    return [((x.lineno, x.col_offset), (x.end_lineno, x.end_col_offset)) for x in parts if x is not None]


def mutants_of(root: Path, path: Path) -> Iterator[Mutant]:
    """All mutants of a file, each with an empty `instead`."""
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
                text = source.splitlines()[start[0] - 1]
                yield Mutant(str(path.relative_to(root)), start[0], text, "", name, occurrence)


def mutated(source: str, mutant: Mutant) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return str(mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence))


def with_change(root: Path, mutant: Mutant) -> Mutant | None:
    """The mutant with the first line that it changes; None if it is no Python, as without the star before arguments."""
    before = (root / mutant.path).read_text()
    after = mutated(before, mutant)
    try:
        ast.parse(after)
    except SyntaxError:
        return None
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    text, instead = next(((a, b) for a, b in pairs if a != b), ("", ""))
    return replace(mutant, text=text, instead=instead)


def sample(root: Path, size: int, seed: int) -> list[Mutant]:
    """`size` mutants: of a folder as many as it has places that can be mutated, of a place one at most."""
    drawn = random.Random(seed)
    places: dict[tuple[str, int, str], list[Mutant]] = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        for mutant in mutants_of(root, path):
            # Each of the twelve other operators that may replace a `+` is one chance of the same place.
            places[mutant.path, mutant.line, mutant.operator.split("_")[0]].append(mutant)
    chosen = (drawn.choice(places[place]) for place in drawn.sample(sorted(places), len(places)))
    changed = (with_change(root, mutant) for mutant in chosen)
    return list(itertools.islice((mutant for mutant in changed if mutant), size))


@dataclass
class Suite:
    """Facts about the tests: which run a line, how long they take, which are slow."""

    by_line: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]
    slow: set[str]

    def of(self, mutant: Mutant, seconds: float) -> list[tuple[str, list[str]]]:
        """Attempts on a mutant: the fast tests of its own folder, the other fast ones, the slow ones, each for a time.

        Tests that run its line come before the others of their files. Tests of less than `INSTANT` come first: most
        rows of tables of bad input are, and each may be the only one to notice. Then of each function the quickest
        case, so that a large table leaves time for the other functions.
        """
        lines = self.by_line.get(mutant.path, {})
        # Tables and definitions run at import, in no test: any test of the file may notice them.
        running = lines.get(mutant.line) or set().union(*lines.values(), set())
        every = {test: test.partition("::")[0] for test in self.seconds}
        name = rf"\b{Path(mutant.path).stem}\b"
        files = {test.partition("::")[0] for test in running}
        files |= {file for file in set(every.values()) if re.search(name, (ROOT / file).read_text())}
        tests = running | {test for test, file in every.items() if file in files}
        cases: dict[str, int] = defaultdict(int)
        ranks = {}
        for test in sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test)):
            ranks[test] = cases[test.partition("[")[0]]
            cases[test.partition("[")[0]] += 1
        near = (f"tests/{mutant.folder}/", f"tests/test_{mutant.folder}.py")
        chosen: dict[tuple[str, bool], list[str]] = {("fast", True): [], ("fast", False): [], ("slow", True): []}
        spent = dict.fromkeys(chosen, 0.0)

        def order(test: str) -> tuple[bool, int, float, str]:
            took = self.seconds.get(test, 0.0)
            return test not in running, -1 if took < INSTANT else ranks[test], took, test

        for test in sorted(tests, key=order):
            group = ("slow", True) if test in self.slow else ("fast", test.startswith(near))
            spent[group] += self.seconds.get(test, 0.0)
            if not chosen[group] or spent[group] < seconds:
                chosen[group].append(test)
        return [(kind, listed) for (kind, _), listed in chosen.items() if listed]


def record_suite() -> None:
    """Runs the tests once under coverage, for `Suite`."""
    WORK.mkdir(parents=True, exist_ok=True)
    settings = WORK / "coveragerc"
    settings.write_text(f"[run]\nsource = {ROOT / PACKAGE}\ndata_file = {WORK / 'coverage'}\n")
    run = [sys.executable, "-m", "pytest", "-q", "-n", "auto", f"--junitxml={WORK / 'tests.xml'}"]
    run += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    if subprocess.run([*run, *TESTS], cwd=ROOT).returncode:
        (WORK / "tests.xml").unlink(missing_ok=True)
        raise SystemExit("the suite must pass without a mutant")


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


class Bench(mutants.Bench):
    """A copy of the checkout; it knows which tests pass without a mutant."""

    def __init__(self, number: int) -> None:
        super().__init__(WORK / f"copy-{number}")
        self.sound: dict[str, bool] = {}

    def outcome(self, mutant: Mutant, suite: Suite, seconds: float) -> str:
        """The tests that notice the mutant: "fast" ones, "slow" ones, or none ("survived", "not run")."""
        path, tries = self.copy / mutant.path, suite.of(mutant, seconds)
        original = path.read_text()
        for kind, tests in tries:
            if self.noticed(tests, 60 + seconds, path, original, mutated(original, mutant)):
                return kind
        return "survived" if tries else "not run"

    def noticed(self, tests: list[str], limit: float, path: Path, original: str, fault: str) -> bool:
        """True if one of the tests fails, or does not end, with the mutant and passes without it."""
        tests = [test for test in tests if self.sound.get(test, True)]
        while tests:
            self.write(path, fault)
            passed = self.run(tests, limit)
            self.write(path, original)
            if passed:
                return False
            failed = re.search(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - |$)", self.output.read_text(), re.M)
            # A run without a name ended before its summary: the package cannot be imported, or it hangs.
            if failed is None or failed[1] not in tests:
                return True
            if failed[1] not in self.sound:
                self.sound[failed[1]] = self.run([failed[1]], limit)
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

    def run(self, tests: list[str], limit: float) -> bool:
        """True if these tests pass."""
        listed = self.copy / "tests.args"
        listed.write_text("\n".join(tests))
        return self.passes([f"@{listed}"], limit)


def shares(results: list[dict[str, Any]]) -> str:
    """A table: of each folder's mutants, the share that fast tests catch and that all do."""
    rows = ["| folder | mutants | caught by fast tests | by all |", "| --- | --- | --- | --- |"]
    folders: dict[str, list[str]] = defaultdict(list)
    for result in results:
        for folder in (folder_of(result["path"]), "all"):
            folders[folder].append(result["outcome"])
    for folder in sorted(folders, key=lambda name: (name == "all", name)):
        outcomes = folders[folder]
        fast = sum(outcome == "fast" for outcome in outcomes)
        caught = fast + sum(outcome == "slow" for outcome in outcomes)
        rows.append(f"| {folder} | {len(outcomes)} | {fast / len(outcomes):.0%} | {caught / len(outcomes):.0%} |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts the mutants of the package that the tests notice.")
    parser.add_argument("folders", nargs="*", help="of fairseq_fastweights/ (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="of tests, by their record, for each of three tries")
    options = mutants.parse(parser, arguments, 400, WORK / "mutants.jsonl")
    if not options.seconds > 0:  # rejects NaN, too
        parser.error(f"--seconds is {options.seconds}; it must be positive")
    if not (WORK / "tests.xml").exists():
        record_suite()
    suite = load_suite()
    drawn = sample(ROOT, options.sample, options.seed)
    drawn = [mutant for mutant in drawn if not options.folders or mutant.folder in options.folders]
    done = {(line["path"], line["operator"], line["occurrence"]) for line in lines_of(options.out)}
    left = [mutant for mutant in drawn if (mutant.path, mutant.operator, mutant.occurrence) not in done]
    print(f"{len(drawn)} mutants, {len(left)} of them to try", flush=True)
    try_all(options, left, lambda number: partial(Bench(number).outcome, suite=suite, seconds=options.seconds))
    print(shares(lines_of(options.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
