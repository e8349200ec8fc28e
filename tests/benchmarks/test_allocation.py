"""Whether freed memory stays with the process, which has to be another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = """
import sys
from harness.allocation import keep_freed_memory
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
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, what], cwd=BENCHMARKS, capture_output=True, text=True, check=False
        )
        if "not glibc" in result.stderr:
            pytest.skip("the C library is not glibc")
        kept[what] = int(result.stdout)
    assert kept["keep"] >= 99 > 10 > kept["not"]
