"""What a call takes at a time, and whether freed memory stays with the process, which has to be another one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from harness.memory import held, peak

from tests.benchmarks.conftest import BENCHMARKS

# ctypes alone: harness.memory is loaded without what it needs for the rest, torch, which takes seconds.
PROGRAM = """
import sys
from unittest.mock import MagicMock
for name in ("torch", "torch.profiler", "torch.utils", "torch.utils._pytree"):
    sys.modules[name] = MagicMock()
from harness.memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("not glibc")
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
large = bytearray(b"x") * (100 << 20)
del large
print(resident() - before >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there is no glibc to be told")
def test_freed_memory_is_kept() -> None:
    kept = {}
    for what in ("keep", "not"):
        command = [sys.executable, "-c", PROGRAM, what]
        result = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
        if "not glibc" in result.stderr:
            pytest.skip("the C library is not glibc")
        kept[what] = int(result.stdout)
    assert kept["keep"] >= 99 > 10 > kept["not"]


def megabytes(number: int) -> torch.Tensor:
    return torch.empty(number << 20, dtype=torch.uint8)


def test_the_peak_of_a_call_counts_what_lives_at_the_same_time() -> None:
    def prepare() -> list[torch.Tensor]:
        megabytes(50)  # gone before the call
        return [megabytes(4)]

    def call(state: list[torch.Tensor]) -> torch.Tensor:
        first = megabytes(1)
        del first
        second = megabytes(1)
        third = megabytes(2)  # with the state, 7 in all
        del second
        state[0] = megabytes(1)  # in place of 4, once it is there
        return third

    assert peak(prepare, call, "cpu") == 7 << 20


def test_the_size_of_a_state_is_that_of_its_tensors() -> None:
    assert held({"a": [torch.zeros(3), None], "b": {"y": torch.zeros(2, dtype=torch.float64)}}) == 28
