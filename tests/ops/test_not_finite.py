"""Steps before one that is not finite are not touched by it, nor are other documents, rows and heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ops.rules import DEVICE, RULES, RuleCase

T = 40
# Backend, keys, values, and the step, which is within a block of any kernel. With heads of 96, every rule's CPU kernel
# works by chunks; step 25 is in a block that the half before it does not read.
Case = tuple[str, int, int, int]
CASES: tuple[Case, ...] = (
    *((backend, 5, 3, 29) for backend in ("reference", "chunkwise", "native")),
    *(("native", 96, 96, step) for step in (25, 29)),
)


def outputs_and_gradients(rule: RuleCase, case: Case, spoilt: str | None, value: float) -> dict[str, Tensor]:
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
def test_steps_before_are_left_alone(rule: RuleCase, case: Case) -> None:
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


BEGIN, END = 20, 66  # of the document that is spoilt


def of_others(x: Tensor) -> Tensor:
    """All that does not belong to that document, in one head of one row of x, (batch, time, heads, ...)."""
    own = torch.zeros(x.shape[:3], dtype=torch.bool, device=x.device)
    own[0, BEGIN:END, 1] = True
    return x[~own]


def of_other_documents(rule: RuleCase, backend: str, spoilt: str, value: float) -> dict[str, Tensor]:
    """The outputs, last states and gradients that others have."""
    inputs = rule.inputs(T=70)
    starts = torch.zeros(2, 70, dtype=torch.bool, device=DEVICE)
    starts[0, [BEGIN, END]] = starts[1, 50] = True
    if spoilt in inputs:
        with torch.no_grad():
            inputs[spoilt][0, 45, 1] = value
    out, state = rule.run(inputs, backend, starts=starts)
    d_out = torch.ones_like(out)
    if spoilt == "d_out":
        d_out[0, 45, 1] = value
    given = {name: x for name, x in inputs.items() if x is not None}
    gradients = torch.autograd.grad((out, state), list(given.values()), (d_out, torch.ones_like(state)))
    found = {"out": of_others(out.detach()), "state": state.detach()}
    grads = zip(given, gradients, strict=True)
    return found | {f"d_{name}": x if name == "initial_state" else of_others(x) for name, x in grads}


@pytest.mark.parametrize("backend", ["reference", "chunkwise", "native"])
@pytest.mark.parametrize("rule", RULES)
def test_other_documents_rows_and_heads_are_left_alone(rule: RuleCase, backend: str) -> None:
    if backend != "reference" and DEVICE.type == "cuda":
        pytest.skip("on a GPU documents are multiplied by decays of 0: docs/limits.md")
    clean = of_other_documents(rule, backend, "", 0)
    names = [name for name, x in rule.inputs(T=2).items() if x is not None and name != "initial_state"]
    for spoilt in (*names, "d_out"):
        for value in (math.nan, math.inf) if spoilt == "v" else (math.nan,):
            for of, x in of_other_documents(rule, backend, spoilt, value).items():
                assert torch.allclose(x, clean[of], rtol=1e-4, atol=1e-4), (spoilt, value, of)
