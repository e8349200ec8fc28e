"""What is not finite at a step is none of the business of the steps before it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ops.rules import DEVICE, RULES, Rule

T, STEP = 40, 29  # of one chunk, and within a block of any kernel
BACKENDS = ("reference", "chunkwise", "native")
# The blocks of these kernels are products with zeros.
LEAKING = ("gated delta", "Kimi delta", "two gates") if DEVICE.type == "cpu" else ()


def outputs_and_gradients(rule: Rule, backend: str, spoilt: str | None, value: float) -> dict[str, Tensor]:
    """The outputs before STEP and their gradients there, with one input not finite at STEP."""
    inputs = rule.inputs(T=T)
    if spoilt is not None:
        with torch.no_grad():
            inputs[spoilt][:, STEP] = value
    out, _ = rule.run(inputs, backend)
    out[:, :STEP].sum().backward()
    gradients = {name: x.grad for name, x in inputs.items() if x is not None}
    return {
        "later": out.detach()[:, STEP:],
        "out": out.detach()[:, :STEP],
        **{n: x[:, :STEP] if n != "initial_state" else x for n, x in gradients.items()},
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_steps_before_are_left_alone(request, rule, backend):
    if backend == "native" and rule.name in LEAKING:
        request.applymarker(pytest.mark.xfail(reason="products with zeros in the CPU kernels", strict=True))
    clean = outputs_and_gradients(rule, backend, None, 0)
    for name, x in rule.inputs(T=T).items():
        if x is None or name == "initial_state":
            continue
        for value in (math.nan, math.inf) if name in ("q", "k", "v") else (math.nan,):
            found = outputs_and_gradients(rule, backend, name, value)
            assert torch.allclose(found["out"], clean["out"], rtol=1e-5, atol=1e-5), name
            # No gradient reaches those outputs from the step; where the definition has 0 times NaN, all may have.
            defined = outputs_and_gradients(rule, "reference", name, value)
            # And it is lost in silence nowhere.
            assert not (found.pop("later").isfinite() & ~defined.pop("later").isfinite()).any(), name
            for of, gradient in found.items():
                assert gradient.isfinite().all() or not defined[of].isfinite().all(), (name, of)
