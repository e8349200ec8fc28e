"""Runs each rule in several processes, compares it with one process, and prints the bytes sent and the times.

    python examples/sequence_parallel/run.py [--processes 2] [--time 2048] [--heads 8] [--key-dim 64] [--value-dim 64]

Processes talk by gloo, on CPUs. Outputs and gradients are compared in the norm of the difference over the norm.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the packages in it

from common.command_line import ArgumentParser, positive
from common.tables import format_table

from fairseq_fastweights import ops
from sequence_parallel.rules import delta_rule, diagonal_rule

Inputs = dict[str, Tensor]
REPEATS = 5
RULES = ("sum", "retention", "decay", "delta", "gated-delta")


def make_inputs(rule: str, sizes: argparse.Namespace, dtype: torch.dtype) -> Inputs:
    """A rule's inputs, the same in every process; gates leave something of each segment's state."""
    draw = torch.Generator().manual_seed(1)
    shape, keys, values = (sizes.batch, sizes.time, sizes.heads), sizes.key_dim, sizes.value_dim

    def normal(*width: int) -> Tensor:
        return torch.randn(*shape, *width, generator=draw, dtype=dtype)

    # In all about -2 over the text: each segment keeps something of the state that enters it.
    def decay(*width: int) -> Tensor:
        return -torch.rand(*shape, *width, generator=draw, dtype=dtype) * 4 / sizes.time

    inputs = {"q": normal(keys), "k": torch.nn.functional.normalize(normal(keys), dim=-1), "v": normal(values)}
    if rule in ("delta", "gated-delta"):
        inputs["beta"] = torch.rand(*shape, generator=draw, dtype=dtype)
    if rule == "gated-delta":
        inputs["log_gate"] = decay(keys)
    elif rule == "retention":
        inputs["log_key_decay"] = decay()
    elif rule == "decay":
        inputs |= {"log_key_decay": decay(keys), "log_value_decay": decay(values)}
    return inputs


def in_one_process(**inputs: Tensor) -> Tensor:
    """The same rule on the whole text."""
    if "beta" in inputs:
        gate = inputs.pop("log_gate", None)
        return ops.fast_weight_rule(erase=inputs["k"], log_key_decay=gate, **inputs)[0]
    return ops.fast_weight_rule(**inputs)[0]


def with_gradients(rule: Callable[..., Tensor], inputs: Inputs, weight: Tensor) -> list[Tensor]:
    """The output of a rule, and the gradients of the inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = rule(**leaves)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), list(leaves.values()))]


def shortest(call: Callable[[], object]) -> float:
    """The milliseconds of the fastest of some calls, all processes starting together."""
    found = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - start))
    return min(found)


def worker(rank: int, sizes: argparse.Namespace, meeting: str, dtype: torch.dtype, results: Any) -> None:
    """Compares this process's segment of each rule with that of one process, and measures times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=sizes.processes)
    segment = slice(rank * sizes.time // sizes.processes, (rank + 1) * sizes.time // sizes.processes)
    for rule in sizes.rules:
        inputs = make_inputs(rule, sizes, dtype)
        weight = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(2), dtype=dtype)
        mine = {name: x[:, segment] for name, x in inputs.items()}
        whole = partial(with_gradients, in_one_process, inputs, weight)
        part = partial(with_gradients, delta_rule if "beta" in inputs else diagonal_rule, mine, weight[:, segment])
        pairs = [(x, y[:, segment]) for x, y in zip(part(), whole(), strict=True)]
        # The delta rule also sends the matrix that its segment applies to a state.
        width = sizes.value_dim + (sizes.key_dim if "beta" in inputs else 0)
        message = torch.zeros(sizes.batch, sizes.heads, sizes.key_dim, width)
        send = partial(dist.all_gather, [torch.empty_like(message) for _ in range(sizes.processes)], message)
        times = [shortest(call) for call in (whole, part, send)] if sizes.measure else [0.0] * 3
        difference = max(float((x - y).norm() / y.norm()) for x, y in pairs)
        results.append((rule, rank, difference, message.nbytes, *times))
        dist.barrier()
    dist.destroy_process_group()


def run(sizes: argparse.Namespace, dtype: torch.dtype = torch.float32) -> list[tuple[Any, ...]]:
    """For each rule and process: names, the largest difference, bytes sent, and three times in milliseconds."""
    with torch.multiprocessing.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.list()
        torch.multiprocessing.spawn(worker, (sizes, f"{folder}/meeting", dtype, results), nprocs=sizes.processes)
        return sorted(results, key=lambda row: (sizes.rules.index(row[0]), row[1]))


def main() -> None:
    """Prints a table."""
    parser = ArgumentParser(description="Compares rules in several processes with one process.")
    defaults = {"processes": 2, "batch": 1, "time": 2048, "heads": 8, "key-dim": 64, "value-dim": 64}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"default: {default}")
    parser.set_defaults(rules=RULES, measure=True)
    options = parser.parse_args()
    if options.time < options.processes:
        parser.error(f"argument --time: {options.time}; it must be at least --processes, which is {options.processes}")
    rows = [
        [rule, f"{difference:.1e}", f"{size / 1024:.0f} KiB", f"{one:.0f} ms", f"{several:.0f} ms", f"{sending:.2f} ms"]
        for rule, rank, difference, size, one, several, sending in run(options)
        if rank == options.processes - 1
    ]
    print(format_table(["rule", "difference", "sent", "one process", "each of them", "sending alone"], rows))


if __name__ == "__main__":
    main()
