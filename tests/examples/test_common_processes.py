"""Processes that share work end with what started them, even where they are ended as soon as they are started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A fork that takes its time leaves a gap between itself and the new process's first steps, in which a signal comes.
PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, "examples")
from common.processes import pool

signal.signal(signal.SIGTERM, signal.default_int_handler)
if sys.argv[1] == "late":
    fork = os.fork

    def late_fork():
        made = fork()
        if made == 0:
            time.sleep(0.5)
        return made

    os.fork = late_fork
with pool(2, int, "7") as processes:
    if sys.argv[1] == "work":
        print(processes.map(abs, [-1, 2]))
assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


def outcome(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_processes_share_work() -> None:
    result = outcome("work")
    assert (result.returncode, result.stdout, result.stderr) == (0, "[1, 2]\n", "")


def test_processes_that_are_ended_at_once_end() -> None:
    for how in ("at once", "late"):
        result = outcome(how)
        assert (result.returncode, result.stderr) == (0, ""), how


def test_a_program_that_is_ended_leaves_no_process() -> None:
    program = (
        "import os, signal, sys, time\n"
        "sys.path.insert(0, 'examples')\n"
        "from common.processes import pool\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "with pool(1) as processes:\n"
        "    print(processes.apply(os.getpid), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as p:
        assert p.stdout is not None
        worker = int(p.stdout.readline())
        p.send_signal(signal.SIGTERM)
        p.communicate(timeout=60)
    assert not Path(f"/proc/{worker}").exists()
