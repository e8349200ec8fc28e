"""Several processes on CPUs, by fairseq's own defaults."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults import trained

from tests.conftest import QUIET, ROOT, SMALL_MODEL, TASK, train
from tests.tasks.conftest import losses

FLAGS = """--no-token-positional-embeddings --carry-over-state --tokens-per-sample 16 --lr 0.001 --max-update 6
    --disable-validation --optimizer adam""".split()


@pytest.mark.slow
def test_two_processes_are_one_with_the_same_batches(our_fairseq, corpus, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [str(Path(sys.executable).with_name("fairseq-train")), str(corpus), *TASK, *SMALL_MODEL, *QUIET, *FLAGS]
    result = subprocess.run(
        [*torchrun, *command, "--batch-size", "4", "--save-dir", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    log = train(corpus, tmp_path / "one", *FLAGS, "--batch-size", "8")
    # Of three decimals; sums of float32 in another order differ in the seventh digit.
    assert losses(result.stdout) == pytest.approx(losses(log), abs=2e-3)
    one, two = (trained(tmp_path / name)["model"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, x in one.items():
        assert torch.allclose(x, two[name], atol=1e-5), name


def test_who_asks_for_processes_without_starting_them_is_told_how(our_fairseq, corpus, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("fairseq starts a process for each GPU")
    with pytest.raises(SystemExit, match=r"distributed_world_size is 2.*torchrun --nproc_per_node 2"):
        train(corpus, tmp_path, "--distributed-world-size", "2")
