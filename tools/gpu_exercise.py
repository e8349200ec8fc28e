"""Programs that check compiled kernels on a GPU besides the tests: small ones, each for a process of its own.

    python tools/gpu_exercise.py memory|determinism|graph [--device cpu]

`memory` calls every operator at small, odd sizes, for compute-sanitizer to watch. `determinism` compares the bits of
two runs. `graph` captures steps in a CUDA graph and replays them. The output is a JSON list of the calls that gave
other bits; the exit status is 1 if there are any.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.harness.cases import RULES, Shape, draw_inputs
from fairseq_fastweights import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# (batch, heads, time, key_dim, value_dim): fewer steps than any chunk, one chunk, several and a part of one; sizes that
# fit no tile, and ones that fill them; steps enough for one head to be divided in time.
SMALL_SIZES = ((2, 3, 5, 7, 9), (1, 2, 64, 16, 16), (1, 1, 131, 33, 65), (1, 1, 200, 64, 64), (2, 1, 2, 130, 5))
SMALL_SHAPES = [Shape("small", *sizes) for sizes in (*SMALL_SIZES, (1, 1, 530, 12, 7))]
LARGE_SHAPES = [Shape("large", *sizes) for sizes in ((8, 8, 256, 16, 16), (2, 4, 1024, 64, 64), (1, 2, 4096, 64, 128))]
Operation = Callable[..., tuple[Tensor, Tensor]]


def calls(dtypes: Sequence[torch.dtype], shapes: Sequence[Shape], device: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Each rule with inputs and each algorithm of the CUDA kernels, which are asked for it meanwhile, and for none at
    the end: a title, the rule, q, k, v and the gates, and a state.

    They lie as fairseq has them, (time, batch, heads, dim), and are made on the CPU, so that compute-sanitizer has few
    kernels of torch's to watch.
    """
    for algorithm, dtype, shape in itertools.product(("recurrent", "chunked"), dtypes, shapes):
        os.environ["FASTWEIGHTS_CUDA_ALGORITHM"] = algorithm
        inputs = draw_inputs(shape, dtype, "cpu", seed=shape.time)
        for rule in RULES:
            given = (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])
            tensors = [x.transpose(0, 1).contiguous().to(device).transpose(0, 1) for x in given]
            sizes = (shape.batch, shape.heads, shape.key_dim, shape.value_dim)
            state = torch.ones(sizes, dtype=ops.state_dtype(dtype)).to(device)
            yield f"{rule}, {algorithm}, {dtype}, {shape}", RULES[rule], tensors, state
    del os.environ["FASTWEIGHTS_CUDA_ALGORITHM"]


def differentiated(rule: Operation, inputs: list[Tensor], state: Tensor) -> list[Tensor]:
    """Output, final state and all gradients."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, state)]
    outputs = rule(*leaves[:-1], initial_state=leaves[-1], backend="native")
    gradients = torch.autograd.grad(outputs, leaves, [torch.ones(x.shape, dtype=x.dtype).to(x.device) for x in outputs])
    return [*outputs, *gradients]


def step(rule: Operation, inputs: list[Tensor], state: Tensor) -> Tensor:
    """The output of one step that changes `state`."""
    with torch.no_grad():
        return rule(*inputs, initial_state=state, backend="native", in_place=True)[0]


def memory(device: str) -> list[str]:
    """Calls every operator, forward, backward and step."""
    for _, rule, inputs, state in calls(DTYPES, SMALL_SHAPES, device):
        differentiated(rule, inputs, state)
        with torch.no_grad():
            rule(*inputs, backend="native")
        # A state that is part of a wider one, as a model's cache of several layers is.
        step(rule, [x[:, :1] for x in inputs], functional.pad(state, (0, 3, 1, 0))[:, :, 1:, :-3])
    if device == "cuda":
        torch.cuda.synchronize()
    return []


def determinism(device: str) -> list[str]:
    """The calls of which a second run gives other bits, over memory that held NaN."""
    differing = []
    shapes = (*SMALL_SHAPES, *(LARGE_SHAPES if device == "cuda" else ()))
    for title, rule, inputs, state in calls(DTYPES[:3], shapes, device):
        first = [x.clone() for x in differentiated(rule, inputs, state)]
        poison = [torch.full_like(x, torch.nan) for x in first]
        del poison
        second = differentiated(rule, inputs, state)
        # As bytes: numbers beyond float16 may be NaN, which equals nothing.
        pairs = ((x.contiguous().view(torch.uint8) for x in pair) for pair in zip(first, second, strict=True))
        if not all(torch.equal(*pair) for pair in pairs):
            differing.append(title)
    return differing


def graph(device: str) -> list[str]:
    """The steps that, captured in a CUDA graph and replayed on new inputs, give other bits than ordinary calls."""
    differing = []
    for title, rule, inputs, state in calls(DTYPES[:3], [Shape("step", 4, 8, 1, 64, 64)], device):
        expected_state = state.clone()
        step(rule, inputs, state.clone())  # work of the first call alone is not captured
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = step(rule, inputs, state)
        state.copy_(expected_state)
        for scale in (1.0, 0.5, 0.25):
            inputs[2].mul_(scale)
            captured.replay()
            expected = step(rule, inputs, expected_state)
            if not (torch.equal(out, expected) and torch.equal(state, expected_state)):
                differing.append(f"{title}, values times {scale}")
    return differing


PROGRAMS = {"memory": memory, "determinism": determinism, "graph": graph}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Small programs for compiled kernels on a GPU.")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    differing = PROGRAMS[options.program](options.device)
    print(json.dumps(differing))
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
