"""Several processes: two nodes as two agents of torchrun, Slurm acted; rules over segments of one text."""

import os
import re
import signal
import socket
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from sequence_parallel.run import RULES
from sequence_parallel.run import run as run_in_parallel

from tests.conftest import QUIET, SMALL_MODEL, TASK
from tests.examples.conftest import EXAMPLES, PATH, run_script, write_programs

FLAGS = "--optimizer adam --lr 0.01 --tokens-per-sample 16 --batch-size 4 --disable-validation".split()
FLAGS += [*TASK, *SMALL_MODEL, *QUIET]


def free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


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
    port, log = free_port(), tmp_path / "log"
    words = elastic[3].replace("FIRST:29500", f"localhost:{port}").replace("--nproc_per_node 8", "--nproc_per_node 1")
    program = Path(PATH.split(os.pathsep)[0]) / "fairseq-train"
    command = [*f"torchrun {words} --monitor-interval 0.2 {program} {corpus}".split(), *FLAGS]
    command += f"--max-update 300 --save-interval 100 --save-interval-updates 100 --save-dir {tmp_path}".split()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": PATH, elastic[1]: elastic[2]}

    def start() -> subprocess.Popen[str]:
        with log.open("a") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=env, text=True)

    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("localhost", port)) == 0

    agents = [start()]
    try:
        wait_for(listens)  # so that the first agent has the list of all, as FIRST has
        agents.append(start())
        wait_for(lambda: '"num_updates": "110"' in log.read_text())
        kill_node(agents[1])
        agents.append(start())
        assert [agent.wait(300) for agent in (agents[0], agents[2])] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill_node(agent)
    losses = re.findall(r'"loss": "([^"]+)".*"num_updates": "(\d+)"', log.read_text())
    numbers = [int(number) for _, number in losses]
    lost = sum(number == place for place, number in enumerate(numbers, start=1))  # all until it was killed
    assert 110 <= lost < 300 and numbers == [*range(1, lost + 1), *range(101, 301)], "the training went on once"
    # Those that were done again came out as before.
    assert losses[100:lost] == losses[lost : 2 * lost - 100]


@pytest.mark.slow
def test_two_nodes_of_slurms_train_one_model(our_fairseq, corpus, tmp_path):
    # One agent for each node; it fails if one does.
    programs = {"scontrol": "echo localhost; echo localhost", "srun": '"$@" & first=$!; "$@" & wait $! && wait $first'}
    env = {"SLURM_JOB_NODELIST": "two", "SLURM_NNODES": 2, "SLURM_JOB_ID": 7, "PROCESSES": 1, "PORT": free_port()}
    env["PATH"] = write_programs(tmp_path, programs)
    flags = [*FLAGS, "--max-update", "2", "--save-dir", tmp_path / "checkpoints"]
    result = run_script(EXAMPLES / "distributed" / "train.sbatch", corpus, *flags, env=env)
    assert result.returncode == 0, result.stderr
    assert "training on 2 devices" in result.stdout and (tmp_path / "checkpoints" / "checkpoint_last.pt").is_file()


def test_segments_in_processes_are_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forked, for a new process would take seconds to import torch.
    forked = partial(torch.multiprocessing.start_processes, start_method="fork")
    monkeypatch.setattr(torch.multiprocessing, "spawn", forked)
    # 37 steps, which 2 processes share unequally; a state that is not square.
    sizes = {"processes": 2, "batch": 2, "time": 37, "heads": 2, "key_dim": 5, "value_dim": 3}
    found = run_in_parallel(Namespace(**sizes, rules=RULES, measure=False), torch.float64)
    assert [row[:2] for row in found] == [(rule, rank) for rule in RULES for rank in range(2)]
    # Sums in another order.
    assert all(difference < 1e-12 for _, _, difference, *_ in found), found
