"""Two nodes, as two agents of torchrun on one machine; what Slurm would do is acted."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import QUIET, SMALL_MODEL, TASK
from tests.examples.conftest import EXAMPLES, PATH, run_script

ACTED = {
    "scontrol": "echo localhost; echo localhost",
    # One agent for each node; it fails if one does.
    "srun": '"$@" & first=$!; "$@" & wait $! && wait $first',
}
FLAGS = "--optimizer adam --lr 0.01 --tokens-per-sample 16 --batch-size 4 --disable-validation".split()
FLAGS += [*TASK, *SMALL_MODEL, *QUIET]


def free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.slow
def test_two_nodes_train_one_model(our_fairseq, corpus, tmp_path):
    for name, script in ACTED.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_NODELIST": "two", "SLURM_NNODES": 2, "SLURM_JOB_ID": 7, "PROCESSES": 1, "PORT": free_port()}
    env["PATH"] = f"{tmp_path}{os.pathsep}{PATH}"
    flags = [*FLAGS, "--max-update", "2", "--save-dir", tmp_path / "checkpoints"]
    result = run_script(EXAMPLES / "distributed" / "train.sbatch", corpus, *flags, env=env)
    assert result.returncode == 0, result.stderr
    assert "training on 2 devices" in result.stdout and (tmp_path / "checkpoints" / "checkpoint_last.pt").is_file()


def wait_for(what: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def kill_node(agent: subprocess.Popen[str]) -> None:
    """As when a machine fails: the agent and what it has started, which has a session of its own."""
    started = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in [agent.pid, *map(int, started)]:
        os.kill(pid, signal.SIGKILL)
    agent.wait()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_a_node_that_is_killed_and_started_again_takes_part_again(our_fairseq, corpus, tmp_path):
    page = (EXAMPLES / "distributed" / "README.md").read_text()
    elastic = re.search(r"export (\w+)=(\w+)\ntorchrun (--max-restarts.*?) \\\n", page)
    assert elastic is not None
    port = free_port()
    words = elastic[3].replace("FIRST:29500", f"localhost:{port}").replace("--nproc_per_node 8", "--nproc_per_node 1")
    program = Path(PATH.split(os.pathsep)[0]) / "fairseq-train"
    # No checkpoints at the ends of epochs.
    command = [*f"torchrun {words} --monitor-interval 0.2 {program} {corpus}".split(), *FLAGS]
    command += f"--max-update 70 --save-interval 100 --save-interval-updates 30 --save-dir {tmp_path}".split()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": PATH, elastic[1]: elastic[2]}
    # The training is no further than what is read of its log, but for the few updates that a page holds.
    read, log = os.pipe()
    fcntl.fcntl(log, fcntl.F_SETPIPE_SZ, 4096)
    done: list[tuple[int, str]] = []

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, text=True)

    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("localhost", port)) == 0

    agents = [start()]
    try:
        wait_for(listens)  # so that the first agent has the list of all, as FIRST has
        agents.append(start())
        os.close(log)
        with os.fdopen(read) as lines:
            for line in lines:  # until all that write to it have ended
                if found := re.search(r'"loss": "([^"]+)".*"num_updates": "(\d+)"', line):
                    done.append((int(found[2]), found[1]))
                if len(done) == 35 and len(agents) == 2:  # between two checkpoints: some are to be done again
                    kill_node(agents[1])
                    log = os.open(f"/proc/self/fd/{read}", os.O_WRONLY)
                    agents.append(start())
                    os.close(log)
        assert [agent.wait() for agent in (agents[0], agents[2])] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill_node(agent)
    numbers = [number for number, _ in done]
    lost = sum(number == place for place, number in enumerate(numbers, start=1))  # all until it was killed
    assert 35 <= lost < 60 and numbers == [*range(1, lost + 1), *range(31, 71)], "the training went on once"
    # Those that were done again came out as before.
    assert done[lost : 2 * lost - 30] == done[30:lost]
