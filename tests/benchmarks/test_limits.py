"""What a case must move and compute, counted by hand."""

from __future__ import annotations

import pytest
import torch
from harness.cases import Shape, draw_inputs
from harness.limits import bandwidth, limit_of

TOKENS = 2 * 3 * 5
SHAPES = {"segment": Shape("tiny", 2, 3, 5, 4, 7, 2), "step": Shape("step", 2, 3, 1, 4, 7, 2)}
RATES = {"copy": {"1000": 1.0, "1000000": 4.0}, "matmul": {"float32": 1e3}}


@pytest.mark.parametrize(
    ("length", "rule", "kind", "numbers", "operations"),
    [
        ("segment", "sum", "forward", TOKENS * (4 + 4 + 7 + 7), TOKENS * 4 * 7 * 4),
        # The inputs again, the output's gradient, and a gradient for each input.
        ("segment", "sum", "forward+backward", TOKENS * (3 * (4 + 4 + 7) + 2 * 7), TOKENS * 4 * 7 * 14),
        ("segment", "gated", "forward", TOKENS * (4 + 4 + 7 + 7 + 1), TOKENS * 4 * 7 * 5),
        ("segment", "decay", "forward", TOKENS * (4 + 4 + 7 + 7 + 4 + 7), TOKENS * 4 * 7 * 6),
        ("segment", "delta", "forward+backward", TOKENS * (3 * (4 + 4 + 7 + 1) + 2 * 7), TOKENS * 4 * 7 * 22),
        # The pairs below the diagonal, of scores and of values.
        ("segment", "softmax", "forward", TOKENS * 4 * 7, 2 * 3 * (1 + 2 + 3 + 4 + 5) * (2 * 7 + 2 * 7)),
        ("step", "sum", "step", 2 * 3 * (4 + 4 + 7 + 7 + 2 * 4 * 7), 2 * 3 * 4 * 7 * 4),
    ],
)
def test_every_tensor_is_moved_once(length: str, rule: str, kind: str, numbers: int, operations: int) -> None:
    inputs = draw_inputs(SHAPES[length], torch.float32, "cpu")
    limit = limit_of(SHAPES[length], rule, "float32", kind, inputs, RATES)
    assert (limit["bytes"], limit["operations"]) == (4 * numbers, operations)
    assert limit["binding"] == "bandwidth" and limit["seconds"] == limit["bytes"] / 1.0
    fast = limit_of(SHAPES[length], rule, "float32", kind, inputs, {**RATES, "copy": {"1000": 1e9}})
    assert fast["binding"] == "arithmetic" and fast["seconds"] == operations / 1e3


def test_the_bandwidth_is_that_of_a_copy_of_about_this_size() -> None:
    assert [bandwidth(RATES, size) for size in (100, 20_000, 40_000)] == [1.0, 1.0, 4.0]
