"""Two nodes, as two agents of torchrun on one machine; what Slurm would do is acted."""

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


def kill_node(agent: subprocess.Popen[bytes]) -> None:
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
    port, logs = free_port(), [tmp_path / "first.log", tmp_path / "second.log"]
    words = elastic[3].replace("FIRST:29500", f"localhost:{port}").replace("--nproc_per_node 8", "--nproc_per_node 1")
    program = Path(PATH.split(os.pathsep)[0]) / "fairseq-train"
    command = f"torchrun {words} --monitor-interval 0.2 {program} {corpus}".split()
    # No checkpoints at the ends of epochs, and enough updates between two for a kill that is late.
    command += [
        *FLAGS,
        *f"--max-update 100 --save-interval 100 --save-interval-updates 30 --save-dir {tmp_path}".split(),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": PATH, elastic[1]: elastic[2]}

    def start(log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=env)

    def updates() -> list[tuple[int, str]]:
        """The log of the training's first process: each update's number and loss."""
        found = re.findall(r'"loss": "([^"]+)".*"num_updates": "(\d+)"', "".join(log.read_text() for log in logs))
        return [(int(number), loss) for loss, number in found]

    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("localhost", port)) == 0

    agents = [start(logs[0])]
    try:
        wait_for(listens)  # so that the first agent has the list of all, as FIRST has
        agents.append(start(logs[1]))
        # Between two checkpoints: some updates are to be done again.
        wait_for(lambda: any(number > 30 and 3 < number % 30 < 15 for number, _ in updates()[-1:]))
        kill_node(agents[1])
        agents[1] = start(logs[1])
        assert [agent.wait(timeout=300) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill_node(agent)
    done = updates()
    numbers = [number for number, _ in done]
    lost = sum(number == place for place, number in enumerate(numbers, start=1))  # all until it was killed
    resumed = numbers[lost]
    assert lost - 30 < resumed <= lost and (resumed - 1) % 30 == 0
    assert numbers == [*range(1, lost + 1), *range(resumed, 101)], "the training went on once"
    # Those that were done again came out as before.
    assert done[lost : 2 * lost - resumed + 1] == done[resumed - 1 : lost]
