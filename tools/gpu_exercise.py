"""What compiled kernels must show on a GPU besides the tests: small programs, each for a process of its own.

    python tools/gpu_exercise.py memory|determinism|graph|first-call [--device cpu]

`memory` calls every operator at small, odd sizes, for compute-sanitizer to watch. `determinism` compares the bits of
two runs. `graph` captures steps in a CUDA graph and replays them. `first-call` measures by how much the first call of a
process takes longer than the second. The last line of output is JSON with what was found; the exit status is 1 where it
is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fairseq_fastweights import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# (batch, time, heads, key_dim, value_dim): fewer steps than any chunk, one chunk, several and a part of one; sizes that
# fit no tile, and ones that fill them; steps enough for one head to be divided in time.
SMALL_SHAPES = (
    (2, 5, 3, 7, 9),
    (1, 64, 2, 16, 16),
    (1, 131, 1, 33, 65),
    (1, 200, 1, 64, 64),
    (2, 2, 1, 130, 5),
    (1, 530, 1, 12, 7),
)
LARGE_SHAPES = ((8, 256, 8, 16, 16), (2, 1024, 4, 64, 64), (1, 4096, 2, 64, 128))
ALGORITHMS = ("recurrent", "chunked")
"""Of the CUDA kernels: what FASTWEIGHTS_CUDA_ALGORITHM may ask for, where both can run."""
MOST_EXTRA_MILLISECONDS = 50.0
"""That a process's first call may take beyond its second."""

Rule = Callable[..., tuple[Tensor, Tensor]]


def each_algorithm() -> Iterator[str]:
    """Asks for one after the other, and for none at the end."""
    for name in ALGORITHMS:
        os.environ["FASTWEIGHTS_CUDA_ALGORITHM"] = name
        yield name
    del os.environ["FASTWEIGHTS_CUDA_ALGORITHM"]


def calls(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str
) -> Iterator[tuple[str, Rule, list[Tensor]]]:
    """Each rule with inputs: its name, itself, and q, k, v and the gates."""
    batch, steps, heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(steps)

    def sequence(dim: int, function: Callable[[Tensor], Tensor] = torch.Tensor.contiguous) -> Tensor:
        # As fairseq has them: (time, batch, channels) in memory, read as (batch, time, heads, dim). Made on the CPU, so
        # that compute-sanitizer has few kernels of torch's to watch.
        x = function(torch.randn(steps, batch, heads, dim, generator=generator)).to(device, dtype)
        return x.transpose(0, 1)

    def log_gate(x: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(x + 2)

    def key(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    q, k, v = sequence(key_dim), sequence(key_dim, key), sequence(value_dim)
    yield "sum", ops.sum_rule, [q, k, v]
    yield "gated", ops.gated_rule, [q, k, v, sequence(1, log_gate)[..., 0]]
    yield "decay", ops.decay_rule, [q, k, v, sequence(key_dim, log_gate), sequence(value_dim, log_gate)]
    yield "delta", ops.delta_rule, [q, k, v, sequence(1, torch.sigmoid)[..., 0]]


def state_for(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str) -> Tensor:
    batch, _, heads, key_dim, value_dim = shape
    return torch.ones(batch, heads, key_dim, value_dim, dtype=ops.state_dtype(dtype)).to(device)


def differentiated(rule: Rule, inputs: list[Tensor], state: Tensor) -> list[Tensor]:
    """Output, final state and all gradients."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, state)]
    outputs = rule(*leaves[:-1], initial_state=leaves[-1], backend="native")
    gradients = torch.autograd.grad(outputs, leaves, [torch.ones(x.shape, dtype=x.dtype).to(x.device) for x in outputs])
    return [*outputs, *gradients]


def step(rule: Rule, inputs: list[Tensor], state: Tensor) -> Tensor:
    """The output of one step that changes `state`."""
    with torch.no_grad():
        return rule(*inputs, initial_state=state, backend="native", in_place=True)[0]


def memory(device: str) -> dict[str, Any]:
    """Calls every operator, forward, backward and step."""
    count = 0
    for _ in each_algorithm():
        for dtype in DTYPES:
            for shape in SMALL_SHAPES:
                for _, rule, inputs in calls(shape, dtype, device):
                    differentiated(rule, inputs, state_for(shape, dtype, device))
                    with torch.no_grad():
                        rule(*inputs, backend="native")
                    # A state that is part of a wider one, as a model's cache of several layers is.
                    wide = state_for((*shape[:3], shape[3] + 1, shape[4] + 3), dtype, device)
                    step(rule, [x[:, :1] for x in inputs], wide[:, :, 1:, : shape[4]])
                    count += 3
            synchronize(device)
    return {"calls": count, "right": True}


def determinism(device: str) -> dict[str, Any]:
    """Whether two runs give the same bits, over memory that held other things."""
    differing = []
    shapes = (*SMALL_SHAPES, *(LARGE_SHAPES if device == "cuda" else ()))
    for algorithm in each_algorithm():
        for dtype, shape in itertools.product((torch.float32, torch.bfloat16), shapes):
            for name, rule, inputs in calls(shape, dtype, device):
                first = [x.clone() for x in differentiated(rule, inputs, state_for(shape, dtype, device))]
                poison = [torch.full_like(x, torch.nan) for x in first]
                del poison
                second = differentiated(rule, inputs, state_for(shape, dtype, device))
                if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
                    differing.append(f"{name}, {algorithm}, {dtype}, {shape}")
    return {"differing": differing, "right": not differing}


def graph(device: str) -> dict[str, Any]:
    """Whether steps that were captured in a CUDA graph give, replayed on new inputs, the bits of ordinary calls."""
    differing = []
    shape = (4, 1, 8, 64, 64)
    for dtype in (torch.float32, torch.bfloat16):
        for name, rule, inputs in calls(shape, dtype, device):
            state = state_for(shape, dtype, device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step(rule, inputs, state.clone())
            torch.cuda.current_stream().wait_stream(side)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                out = step(rule, inputs, state)
            expected_state = state.copy_(state_for(shape, dtype, device)).clone()
            for scale in (1.0, 0.5, 0.25):
                inputs[2].mul_(scale)
                captured.replay()
                expected = step(rule, inputs, expected_state)
                if not (torch.equal(out, expected) and torch.equal(state, expected_state)):
                    differing.append(f"{name}, {dtype}, values times {scale}")
    return {"differing": differing, "right": not differing}


def first_call(device: str) -> dict[str, Any]:
    """By how many milliseconds the first call of each kind takes longer than the second, after torch's own first."""
    shape = (8, 256, 8, 64, 64)
    warm = torch.randn(64, 64, device=device, requires_grad=True)
    (warm @ warm).sum().backward()
    extra = {}
    for name, rule, inputs in calls(shape, torch.float32, device):
        one = [x[:, :1] for x in inputs]
        state = state_for(shape, torch.float32, device)
        kinds: tuple[tuple[str, Callable[[], object]], ...] = (
            ("forward", partial(rule, *inputs, backend="native")),
            ("forward+backward", partial(differentiated, rule, inputs, state)),
            ("step", partial(step, rule, one, state)),
        )
        for kind, call in kinds:
            first, second = timed(call, device), timed(call, device)
            extra[f"{name} {kind}"] = round(1e3 * (first - second), 2)
    return {"extra milliseconds": extra, "right": max(extra.values()) <= MOST_EXTRA_MILLISECONDS}


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds that a call takes, until the device is done."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


PROGRAMS = {"memory": memory, "determinism": determinism, "graph": graph, "first-call": first_call}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Small programs for compiled kernels on a GPU.")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    found = PROGRAMS[options.program](options.device)
    print(json.dumps(found))
    return 0 if found["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
