"""Processes that share work end with what started them, even where they are ended as soon as they are started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

# A fork that takes its time leaves a gap between itself and the new process's first steps, in which a signal comes.
PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, "examples")
from common.processes import pool

signal.signal(signal.SIGTERM, signal.default_int_handler)
fork = os.fork

def late_fork():
    made = fork()
    if made == 0:
        time.sleep(0.5)
    return made

if sys.argv[1] == "late":
    os.fork = late_fork
with pool(2, int, "7") as processes:
    if sys.argv[1] == "work":
        print(processes.apply(os.getpid), flush=True)
        time.sleep(60)
assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


@pytest.mark.parametrize("how", ["at once", "late"])
def test_processes_that_are_ended_at_once_end(how: str) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_program_that_is_ended_leaves_no_process() -> None:
    words = [sys.executable, "-c", PROGRAM, "work"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=60)
    assert not Path(f"/proc/{worker}").exists()
