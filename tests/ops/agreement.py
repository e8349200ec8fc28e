"""When two results are the same, or near enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.ops.results import cotangents, definition, differentiate, named, outcome
from tests.ops.rules import DEVICE, Inputs, RuleCase, mapped, state_dtype

TOLERANCE = {
    torch.float32: 1e-5,  # the project's promise for every backend, up to T = 4096
    # Half a unit in the last place is 4e-3; out and gradients are rounded once at least. float16 has three bits more.
    torch.bfloat16: 2e-2,
    torch.float16: 2e-2,
    # 1e-16 times the terms of a sum; logs of -1e4 cost four digits of it within a chunk.
    torch.float64: 1e-11,
}


def parts(tensors: Inputs, rows: Sequence[str]) -> Inputs:
    """As many parts of the batch as `rows` names, under those names."""
    if not rows:
        return tensors
    chunks = {name: [None] * len(rows) if x is None else x.chunk(len(rows)) for name, x in tensors.items()}
    return {f"{name} ({row})": x for name, split in chunks.items() for row, x in zip(rows, split, strict=True)}


def relative_error(actual: Tensor | None, expected: Tensor | None, vanishing: float = 0) -> float:
    """Norm of the difference over the norm of `expected` (over 1 where that is at most `vanishing`)."""
    if expected is None:
        return 0.0 if actual is None else actual.double().norm().item()
    if actual is None:
        return 1.0 if expected.norm() > vanishing else 0.0
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    actual, expected = actual.cpu().double(), expected.cpu().double()
    norm = expected.norm().item()
    return (actual - expected).norm().item() / (norm if norm > vanishing else 1.0)


def assert_close(actual: Inputs, expected: Inputs, tolerance: float, vanishing: float = 0) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name], vanishing) for name in expected}
    # `not <=` and no `>`: a NaN is a failure.
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"


def assert_same(actual: Inputs, expected: Inputs, when: str) -> None:
    """The same bits in the same dtypes."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype and torch.equal(actual[name], x), f"{name} {when}"


def assert_agrees(
    rule: RuleCase,
    backend: str,
    inputs: Inputs,
    tolerance: float | None = None,
    *,
    use: str = "out, final_state",
    lay: Callable[[Tensor], Tensor] = lambda x: x,
    rows: Sequence[str] = (),
) -> None:
    """Outputs and every gradient of `backend` are those of the float64 reference; its inputs stay as they were.

    `use` names the outputs that the loss is of; `lay` lays their gradients; `rows` are equal parts that all must agree.
    """
    before = mapped(inputs, lambda x: x.detach().clone())
    outputs = rule.run(inputs, backend)
    dtype = next(iter(inputs.values())).dtype
    assert [x.dtype for x in outputs] == [dtype, state_dtype(dtype)], "dtypes of the outputs"
    drawn = [lay(x) for x in cotangents(outputs)]
    weights = (drawn[0] if "out" in use else None, drawn[1] if "state" in use else None)
    copies = [x.clone() for x in drawn]
    grads = differentiate(outputs, inputs, weights)
    for name, grad in grads.items():
        assert grad is None or grad.dtype == inputs[name].dtype, f"dtype of the gradient of {name}"
    for name, x in before.items():
        assert x is None or torch.equal(inputs[name], x), f"{name} was changed"
    assert all(torch.equal(x, y) for x, y in zip(drawn, copies, strict=True)), "a cotangent was changed"
    expected = definition(rule, inputs, weights)
    # What hundreds of corrections leave is a difference of numbers that are larger by far.
    vanishing = 1e-20 if rule.corrects else 0
    assert_close(parts(named(outputs, grads), rows), parts(expected, rows), tolerance or TOLERANCE[dtype], vanishing)


def assert_autocast_does_not_reach_inside(rule: RuleCase, backend: str, dtype: torch.dtype, **sizes: int) -> None:
    """Autocast decides the dtype of projections; from there on dtypes are as outside it, backwards too."""
    inputs = rule.inputs(**{"T": 70} | sizes, dtype=dtype, extras_dtype=torch.float32)
    expected = outcome(rule, backend, inputs)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = outcome(rule, backend, inputs)
        outputs = rule.run(inputs, backend)
    assert_same(inside, expected, "inside autocast")
    backwards_outside = named(outputs, differentiate(outputs, inputs, cotangents(outputs)))
    assert_same(backwards_outside, expected, "backwards outside it")
