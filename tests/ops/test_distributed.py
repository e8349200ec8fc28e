"""Training in several processes with torch's own wrapper; tests/tasks has fairseq's."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from fairseq_fastweights import ops

ROOT = Path(__file__).resolve().parents[2]


class Layer(torch.nn.Module):
    """Rules of either family between projections, so that their gradients reach parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, f, g = (p(x).unflatten(-1, (2, 6)) for p in self.projections)
        k, f, g = k.softmax(-1), f.sigmoid(), g.sigmoid()
        outputs = (*ops.decay_rule(q, k, v, f.log(), g.log()), *ops.gated_delta_rule(q, k, v, g.mean(-1), f.log()))
        return torch.stack([y.square().mean() for y in outputs]).sum()


def gradients(rank: int, world: int) -> list[Tensor]:
    """The gradients of this process's share of a batch of four rows, averaged over all processes."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 20, 12).chunk(world)[rank]
    model = layer if world == 1 else DistributedDataParallel(layer)
    model(x).backward()
    return [p.grad for p in layer.parameters()]


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_the_whole_batch(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    commands = [[sys.executable, __file__, str(rank), str(tmp_path)] for rank in range(2)]
    workers = [subprocess.Popen(x, env=environment, stderr=subprocess.PIPE, text=True) for x in commands]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    alone = gradients(0, 1)
    assert all(grad.abs().max() > 1e-4 for grad in alone)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), alone)


def main() -> None:
    """One of the processes."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.save(gradients(rank, 2), folder / f"{rank}.pt")
    distributed.barrier()
    # Without cleaning up: torch's reducer, where it is the last to let go of the group, waits for gloo's thread with
    # Python's lock in its hands, and that thread may wait for the lock (seen with torch 2.13).
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
