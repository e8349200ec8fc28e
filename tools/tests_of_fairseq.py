"""Runs fairseq's own tests, from a checkout of tag v0.12.2, with the fairseq that is installed here.

    python tools/tests_of_fairseq.py CHECKOUT [PYTEST'S ARGUMENTS]

The release on the package index has no tests. Those of the checkout are copied into a temporary folder: beside the
checkout's own `fairseq` they would test that one. The exit status is 0 if nothing failed but what is listed here, and
nothing that is listed passed.
"""

import argparse
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

NOT_RUN = {
    "tests/gpu": "needs a GPU",
    "tests/speech/": "downloads models",
    "tests/test_hf_hub.py": "downloads a model",
    "tests/test_multihead_attention.py::test_xformers": "needs xformers",
}
"""What test ids begin with, and what the tests need that need not be there."""

_BINARIES = "tests/test_binaries.py::Test"
FAILING = {
    "tests/test_dataclass_utils.py": "has classes of its own that Python >= 3.11 refuses, for their mutable defaults",
    f"{_BINARIES}LanguageModeling::test_transformer_xl_bptt_lm": "transformers 5 has no Transformer-XL any more",
    f"{_BINARIES}Translation::test_insertion_transformer": "libnat's C++ source is not in the release that is built",
}
"""Test ids, and why they fail."""


class Outcomes:
    """pytest's plugin that notes what failed and what passed, by test id."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def surprises(self) -> list[str]:
        """One line for each test that did what is not expected of it."""
        return [
            *(f"failed unexpectedly: {name}" for name in sorted(self.failed - FAILING.keys())),
            *(f"passed unexpectedly: {name} ({FAILING[name]})" for name in sorted(self.passed & FAILING.keys())),
        ]


def main(arguments: list[str] | None = None) -> int:
    """Runs them; returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs fairseq's own tests with the fairseq that is installed.")
    parser.add_argument("checkout", type=Path, help="a folder with fairseq v0.12.2, as git has it")
    options, others = parser.parse_known_args(arguments)
    if not (options.checkout / "tests").is_dir():
        parser.error(f"argument checkout: {options.checkout} has no folder tests")
    installed = find_spec("fairseq")
    if installed is None or installed.origin is None:
        parser.error("fairseq is not installed; python tools/build_fairseq.py does it")
    left_out = [name for name in NOT_RUN if "xformers" not in name or find_spec("xformers") is None]
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory(prefix="fairseq-tests-") as folder:
        shutil.copytree(options.checkout / "tests", Path(folder, "tests"))
        Path(folder, "examples").symlink_to(Path(installed.origin).parent / "examples")
        Path(folder, "scripts").symlink_to(options.checkout.resolve() / "scripts")
        os.chdir(folder)
        deselected = [f"--deselect={name}" for name in left_out]
        flags = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            "--rootdir",
            folder,
            *deselected,
            *(others or ["tests"]),
        ]
        status = pytest.main(flags, plugins=[outcomes])
        os.chdir(Path(folder).parent)
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    print("\n".join(outcomes.surprises() or ["nothing unexpected"]))
    return 1 if outcomes.surprises() else 0


if __name__ == "__main__":
    sys.exit(main())
