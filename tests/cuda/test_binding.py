"""cuda/binding.cpp, which torch calls, with the kernels under the emulator: the operations' own tests, through it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cuda.build import ROOT

# The slowest cases of the emulator.
SLOW = "papers_sizes or every_way_to_fill or large_states or even_for_a_moment"


@pytest.mark.emulated
@pytest.mark.parametrize("algorithm", ["", "chunked"], ids=["as-chosen", "chunked"])
@pytest.mark.parametrize(
    "file", ["test_backends", "test_checks", "test_divided", "test_documents", "test_elementwise", "test_native"]
)
def test_operations_pass_their_tests_through_the_binding(cxx, file, algorithm):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.cuda.binding"]
    selected = ["-m", "not slow", "-k", f"(native or test_checks or test_divided or test_elementwise) and not ({SLOW})"]
    result = subprocess.run(
        [*command, f"tests/ops/{file}.py", *selected],
        cwd=ROOT,
        env=os.environ | {"FASTWEIGHTS_CUDA_ALGORITHM": algorithm, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-2_000:]
    assert " passed" in result.stdout
