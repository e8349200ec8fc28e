"""Steps before one that is not finite are not touched by it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ops.rules import DEVICE, RULES, Rule

T = 40
# Backend, keys, values, and the step, which is within a block of any kernel. With heads of 96, every rule's CPU kernel
# works by chunks; step 25 is in a block that the half before it does not read.
Case = tuple[str, int, int, int]
CASES: tuple[Case, ...] = (
    *((backend, 5, 3, 29) for backend in ("reference", "chunkwise", "native")),
    *(("native", 96, 96, step) for step in (25, 29)),
)


def outputs_and_gradients(rule: Rule, case: Case, spoilt: str | None, value: float) -> dict[str, Tensor]:
    """The outputs before the step and their gradients there, with one input not finite at it."""
    backend, keys, values, step = case
    inputs = rule.inputs(T=T, K=keys, V=values)
    if spoilt is not None:
        with torch.no_grad():
            inputs[spoilt][:, step] = value
    out, _ = rule.run(inputs, backend)
    out[:, :step].sum().backward()
    gradients = {name: x.grad for name, x in inputs.items() if x is not None}
    return {
        "later": out.detach()[:, step:],
        "out": out.detach()[:, :step],
        **{n: x[:, :step] if n != "initial_state" else x for n, x in gradients.items()},
    }


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_steps_before_are_left_alone(rule: Rule, case: Case) -> None:
    backend, *others = case
    if backend == "native" and DEVICE.type == "cuda":
        pytest.skip("tensor cores multiply whole chunks, whose later steps count as zeros: docs/limits.md")
    clean = outputs_and_gradients(rule, case, None, 0)
    for name, x in rule.inputs(T=T).items():
        if x is None or name == "initial_state":
            continue
        for value in (math.nan, math.inf) if name in ("q", "k", "v") else (math.nan,):
            found = outputs_and_gradients(rule, case, name, value)
            assert torch.allclose(found["out"], clean["out"], rtol=1e-5, atol=1e-5), name
            # No gradient reaches those outputs from the step; where the definition has 0 times NaN, all may have.
            defined = outputs_and_gradients(rule, ("reference", *others), name, value)
            # And it is lost in silence nowhere.
            assert not (found.pop("later").isfinite() & ~defined.pop("later").isfinite()).any(), name
            for of, gradient in found.items():
                assert gradient.isfinite().all() or not defined[of].isfinite().all(), (name, of)
