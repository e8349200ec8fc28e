"""The ways in which the CUDA kernels can do one call, and which of them they choose."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fairseq_fastweights.ops import native
from harness.cases import Inputs, Shape

ALGORITHM, PLAN = "FASTWEIGHTS_CUDA_ALGORITHM", "FASTWEIGHTS_CUDA_PLAN"
WAYS = ("forward", "backward")

# What may be asked for; what is no plan of a call is left out.
CHUNKS, COLUMNS, STAGES, THREADS = (16, 32, 64), (16, 32, 48, 64, 96, 128), (1, 2), (128, 256)
SEGMENTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        operation: the operator's name.
        sizes: batch, time, heads, key_dim, value_dim, and steps between kept states.
        run: makes the call.
    """

    operation: str
    sizes: tuple[int, int, int, int, int, int]
    dtype: torch.dtype
    gated: bool
    separate_decays: bool
    run: Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """A way to do a call: the plan in full, None for step by step, and what asks for it."""

    plan: dict[str, int] | None
    environment: dict[str, str]

    def __str__(self) -> str:
        if self.plan is None:
            return "recurrent"
        text = "{chunk} steps x {columns} values, stages {stages}, threads {threads}".format(**self.plan)
        return text + (f", segments {self.plan['segments']}" if self.plan["segments"] > 1 else "")


@contextmanager
def asking(environment: dict[str, str]) -> Iterator[None]:
    """Asks the kernels for a way, and for none afterwards."""
    before = {name: os.environ.get(name) for name in (ALGORITHM, PLAN)}
    for name in before:
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def call_of(shape: Shape, rule: str, way: str, inputs: Inputs) -> Call:
    """The operator that a rule comes down to, with the states that training keeps."""
    native.require(rule, inputs.v.device.type, inputs.v.dtype, shape.key_dim)
    q, k, v = inputs.q, inputs.k, inputs.v
    interval = native._interval(k, v)
    if rule == "delta":
        family, middle = "delta", [inputs.beta]
    else:
        family = "diagonal"
        decays = [inputs.log_key_decay, inputs.log_value_decay] if rule == "decay" else [None, None]
        middle = [inputs.log_gate if rule == "gated" else None, rule == "gated", *decays]
    operators = torch.ops.fairseq_fastweights
    forward, backward = (getattr(operators, f"{family}_{each}") for each in WAYS)

    def run_forward() -> Any:
        return forward(q, k, v, *middle, None, interval)

    run: Callable[[], Any] = run_forward
    if way == "backward":
        states = run_forward()[2]

        def run() -> Any:
            return backward(inputs.d_out, None, q, k, v, *middle, None, states, interval)

    sizes = (shape.batch, shape.time, shape.heads, shape.key_dim, shape.value_dim, interval)
    return Call(f"{family}_{way}", sizes, v.dtype, rule == "gated", rule == "decay", run)


def ways_of(call: Call, capability: tuple[int, int]) -> list[Way]:
    """The ways to do a call, first the one that is taken if nobody asks; other segments for the ordinary plan alone."""

    def found(environment: dict[str, str]) -> Way:
        with asking(environment):
            plan = native.cuda_plan(
                call.operation,
                call.sizes,
                call.dtype,
                capability,
                gated=call.gated,
                separate_decays=call.separate_decays,
            )
        return Way(plan, environment)

    ways = [found({}), found({ALGORITHM: "recurrent"}), found({ALGORITHM: "chunked"})]
    texts = [
        f"chunk={chunk} columns={columns} stages={stages} threads={threads}"
        for chunk, columns, stages, threads in itertools.product(CHUNKS, COLUMNS, STAGES, THREADS)
    ]
    ordinary = ways[2].plan
    if ordinary is not None:
        same = " ".join(f"{name}={ordinary[name]}" for name in ("chunk", "columns", "stages", "threads"))
        texts += [f"{same} segments={segments}" for segments in SEGMENTS]
    # What cannot be had falls back to step by step, which is there already.
    ways += [found({ALGORITHM: "chunked", PLAN: text}) for text in texts]
    unique: dict[tuple[tuple[str, int], ...], Way] = {}
    for way in ways:
        unique.setdefault(() if way.plan is None else tuple(way.plan.items()), way)
    return list(unique.values())
