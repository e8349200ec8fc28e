"""What a call takes at a time, and whether freed memory stays with the process, which has to be another one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from harness.memory import held, peak

from tests.benchmarks.conftest import BENCHMARKS

# harness.memory is loaded without torch, which keep_freed_memory does without and which takes seconds.
PROGRAM = """
import sys
from unittest.mock import MagicMock
sys.modules.update({name: MagicMock() for name in ("torch", "torch.profiler", "torch.utils", "torch.utils._pytree")})
from harness.memory import keep_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
for told in (lambda: True, keep_freed_memory):
    if told():
        before = resident()
        large = bytearray(b"x") * (100 << 20)
        del large
        print(resident() - before >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="elsewhere there is no glibc to be told")
def test_freed_memory_is_kept() -> None:
    printed = subprocess.check_output([sys.executable, "-c", PROGRAM], cwd=BENCHMARKS, text=True)
    before, told = map(int, printed.split())
    assert before < 10 and told >= 99


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
