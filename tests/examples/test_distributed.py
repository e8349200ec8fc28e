"""The script for two nodes, as two agents on one machine; what Slurm would do is acted."""

import os
import socket
import subprocess

import pytest

from tests.conftest import QUIET, ROOT, SMALL_MODEL, TASK
from tests.examples.conftest import PATH

ACTED = {
    "scontrol": "echo localhost; echo localhost",
    # One agent for each node; it fails if one does.
    "srun": '"$@" & first=$!; "$@" & wait $! && wait $first',
}


@pytest.mark.slow
def test_two_nodes_train_one_model(our_fairseq, corpus, tmp_path):
    for name, script in ACTED.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    flags = (
        "--optimizer adam --lr 0.01 --tokens-per-sample 16 --batch-size 4 --max-update 2 --disable-validation".split()
    )
    script = [str(ROOT / "examples" / "distributed" / "train.sbatch"), str(corpus), *TASK, *SMALL_MODEL, *QUIET]
    result = subprocess.run(
        ["bash", *script, *flags, "--save-dir", str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}{os.pathsep}{PATH}", "PROCESSES": "1"}
        | {"SLURM_JOB_NODELIST": "two", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "PORT": str(port)},
    )
    assert result.returncode == 0, result.stderr
    assert "training on 2 devices" in result.stdout and (tmp_path / "checkpoints" / "checkpoint_last.pt").is_file()
