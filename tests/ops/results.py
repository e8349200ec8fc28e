"""Results of an operation by name: outputs and gradients, and those of the float64 reference."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from tests.ops.rules import Inputs, RuleCase, mapped


def cotangents(outputs: tuple[Tensor, Tensor], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random gradients for out and final_state, of their own dtypes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    return drawn[0].to(outputs[0]), drawn[1].to(outputs[1])


def differentiate(
    outputs: tuple[Tensor, Tensor], inputs: Inputs, weights: tuple[Tensor | None, Tensor | None]
) -> Inputs:
    """Gradients by name of whatever in `inputs` needs one; None in `weights`: not used."""
    leaves = {n: x for n, x in inputs.items() if x is not None and x.requires_grad}
    used = [(y, w) for y, w in zip(outputs, weights, strict=True) if w is not None]
    grads = torch.autograd.grad([y for y, _ in used], list(leaves.values()), [w for _, w in used], allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


def in_float64(tensors: Inputs) -> Inputs:
    """The same values, rounded as they are, as new leaves in float64, on the CPU."""
    return mapped(tensors, lambda x: x.detach().cpu().double().requires_grad_(x.requires_grad))


_definitions: dict[tuple, Inputs] = {}


def definition(rule: RuleCase, inputs: Inputs, weights: tuple[Tensor | None, Tensor | None] | None) -> Inputs:
    """Outputs and, where `weights` are given, gradients of the float64 reference, computed once for all that ask."""
    inputs = in_float64(inputs)
    used = None if weights is None else tuple(None if w is None else w.cpu().double() for w in weights)
    given = [None if x is None else x.detach() for x in (*inputs.values(), *(used or ()))]
    numbers = (x if x is None else (hashlib.sha256(x.numpy().tobytes()).digest(), x.shape) for x in given)
    key = (rule, tuple((name, x is not None and x.requires_grad) for name, x in inputs.items()), *numbers)
    if key not in _definitions:
        if len(_definitions) == 256:
            _definitions.clear()
        outputs = rule.reference(inputs)
        grads = None if used is None else differentiate(outputs, inputs, used)
        _definitions[key] = named((outputs[0].detach(), outputs[1].detach()), grads)
    return dict(_definitions[key])


def named(outputs: tuple[Tensor, Tensor], grads: Inputs | None = None) -> Inputs:
    gradients = {f"gradient of {name}": grad for name, grad in (grads or {}).items()}
    return {"out": outputs[0], "final_state": outputs[1]} | gradients


def detached(inputs: Inputs, *, but: str = "") -> Inputs:
    """The same numbers, none of which needs a gradient but the one that is named."""
    return {name: None if x is None else x.detach().requires_grad_(name == but) for name, x in inputs.items()}


def outcome(rule: RuleCase, backend: str, inputs: Inputs, **options: object) -> Inputs:
    """Outputs and gradients by name, for the cotangents that `assert_agrees` draws too."""
    outputs = rule.run(inputs, backend, **options)
    return named(outputs, differentiate(outputs, inputs, cotangents(outputs)))
