"""Training in several processes with torch's own wrapper; tests/tasks has fairseq's."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from fairseq_fastweights import ops

ROOT = Path(__file__).resolve().parents[2]
RULES = ("sum", "gated", "decay", "delta")


class Layer(torch.nn.Module):
    """A rule between projections, so that its gradients reach parameters."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.projections = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, f, g = (p(x).unflatten(-1, (2, 6)) for p in self.projections)
        gates = {
            "sum": (),
            "gated": (torch.nn.functional.logsigmoid(f.sum(-1)),),
            "decay": (torch.nn.functional.logsigmoid(f), torch.nn.functional.logsigmoid(g)),
            "delta": (f.sum(-1).sigmoid(),),
        }[self.rule]
        out, state = getattr(ops, f"{self.rule}_rule")(q, k.softmax(-1), v, *gates)
        return out.square().mean() + state.square().mean()


def gradients(rule: str, rank: int, world: int) -> list[torch.Tensor]:
    """The gradients of this process's share of a batch of four rows, averaged over all processes."""
    torch.manual_seed(0)
    layer = Layer(rule)
    x = torch.randn(4, 20, 12).chunk(world)[rank]
    # Not every rule has a use for every projection.
    model = layer if world == 1 else DistributedDataParallel(layer, find_unused_parameters=True)
    model(x).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_the_whole_batch(tmp_path):
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    for rule in RULES:
        alone = gradients(rule, 0, 1)
        assert any(grad.abs().max() > 1e-4 for grad in alone)
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{rule}-{rank}.pt"), alone)


def main() -> None:
    """One of the processes."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for rule in RULES:
        torch.save(gradients(rule, rank, 2), folder / f"{rule}-{rank}.pt")
    distributed.barrier()
    # Without cleaning up: torch's reducer, where it is the last to let go of the group, waits for gloo's thread with
    # Python's lock in its hands, and that thread may wait for the lock (seen with torch 2.13).
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
