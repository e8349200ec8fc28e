"""Several processes: two nodes as two agents of torchrun, Slurm acted; rules over segments of one text."""

import socket
from argparse import Namespace
from functools import partial

import pytest
import torch
from sequence_parallel.run import RULES
from sequence_parallel.run import run as run_in_parallel

from tests.conftest import QUIET, SMALL_MODEL, TASK
from tests.examples.conftest import EXAMPLES, run_script, write_programs

FLAGS = "--optimizer adam --lr 0.01 --tokens-per-sample 16 --batch-size 4 --disable-validation".split()
FLAGS += [*TASK, *SMALL_MODEL, *QUIET]


def free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


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
