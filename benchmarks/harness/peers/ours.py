"""This project's rules, by backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from torch import Tensor

from fairseq_fastweights import ops
from harness import ROOT
from harness.cases import Inputs, Shape
from harness.contestants import Contestant, Unavailable, Unsuitable, Work, leaf

OPERATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "sum": ops.sum_rule,
    "gated": ops.gated_rule,
    "decay": ops.decay_rule,
    "delta": ops.delta_rule,
}

# The reference is a loop over time: for one step it is what "auto" took before there were kernels.
BACKENDS = ("native", "chunkwise", "reference")


def contestants(rules: Iterable[str]) -> list[Contestant]:
    """Each rule on each backend, backend by backend."""
    return [Contestant(backend, rule, _prepare(backend, rule)) for backend in BACKENDS for rule in rules]


def _prepare(backend: str, rule: str) -> Callable[[Shape, Inputs], Work]:
    def prepare(shape: Shape, inputs: Inputs) -> Work:
        if backend == "reference" and not shape.steps:
            raise Unsuitable
        tensors = [leaf(x) for x in (inputs.q, inputs.k, inputs.v, *inputs.gates(rule))]

        def forward() -> Tensor:
            try:
                return OPERATIONS[rule](*tensors, initial_state=inputs.state, backend=backend)[0]
            except ops.BackendUnavailable as error:
                raise Unavailable(str(error).replace(f"{ROOT}{os.sep}", "")) from error

        return Work(forward, tensors, inputs.d_out)

    return prepare
