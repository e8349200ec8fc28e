"""Mixers on a CPU against their peers, in one run.

Mamba's selective scan: its kernels, its form by chunks and the scan that Hugging Face's Transformers runs on a CPU, one
step after the other, take turns; so do a layer of `Mamba` and a `MambaMixer` with the same weights. Local attention and
ABC take turns with softmax attention. Ratios are of medians. Needs transformers:

    .venv/bin/python benchmarks/mixers.py [--threads 1] [--rounds 5] [--out results.json]
"""

from collections.abc import Iterator
from functools import partial

import torch
from harness.turns import Calls, Comparison, run
from torch.nn import functional as F
from transformers import MambaConfig
from transformers.models.mamba import modeling_mamba

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.registry import build_mixer

SIZES, QUICK_SIZES = {"batch": 4, "channels": 512, "state": 16}, {"batch": 1, "channels": 16, "state": 4}
PEER = "transformers"
# Its backward pass goes over all steps as often as there are steps, which for many takes minutes.
LONGEST_BACKWARD_OF_PEER = 64


def scans(time: int, batch: int, channels: int, state: int) -> Calls:
    """By name a forward pass; each gets its inputs in the memory layout that it wants."""
    u, B, C = (torch.randn(batch, time, size, requires_grad=True) for size in (channels, state, state))
    delta = F.softplus(torch.randn(batch, time, channels) - 4).requires_grad_()
    A = -torch.arange(1.0, state + 1).repeat(channels, 1)
    A.requires_grad_()
    D = torch.ones(channels, requires_grad=True)
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (u, delta, B, C)]
    ours = {name: partial(ops.selective_scan, u, delta, A, B, C, D, backend=name) for name in ("native", "chunkwise")}
    return {**ours, PEER: partial(modeling_mamba.mamba_selective_scan, *theirs[:2], A, *theirs[2:], D)}


def layers(time: int, batch: int, channels: int, state: int) -> Calls:
    config = MambaConfig(hidden_size=channels // 2, state_size=state, num_hidden_layers=1)
    theirs = modeling_mamba.MambaMixer(config, layer_idx=0)
    ours = Mamba(channels // 2, state=state)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(time, batch, channels // 2, requires_grad=True)
    x_theirs = x.detach().transpose(0, 1).contiguous().requires_grad_()
    return {"Mamba": partial(ours, x), PEER: partial(theirs, x_theirs)}


def attention(time: int, batch: int, channels: int, state: int) -> Calls:
    """Layers of one row, in heads of 64 but where they are tiny."""
    x = torch.randn(time, 1, channels, requires_grad=True)
    settings = {"num_heads": max(1, channels // 64)}
    return {name: partial(build_mixer(name, channels, settings), x) for name in ("softmax", "local", "abc")}


def comparisons(sizes: dict[str, int]) -> Iterator[Comparison]:
    cases = [("forward", 1024), ("forward+backward", 1024), ("forward+backward", LONGEST_BACKWARD_OF_PEER)]
    lengths = [("forward+backward", 4**n) for n in range(4, 8)]
    if sizes is QUICK_SIZES:
        cases = lengths = [("forward", 8), ("forward+backward", 8)]
    for part, prepare, its_cases in (
        ("scan", scans, cases),
        ("layer", layers, cases),
        ("attention", attention, lengths),
    ):
        for kind, time in its_cases:
            calls = prepare(time, **sizes)
            if kind != "forward" and time > LONGEST_BACKWARD_OF_PEER:
                calls.pop(PEER, None)
            yield part, kind, time, calls


def main() -> None:
    run(__doc__, "mixers", comparisons, SIZES, QUICK_SIZES)


if __name__ == "__main__":
    main()
