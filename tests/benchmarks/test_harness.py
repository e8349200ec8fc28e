"""A case's bytes and operations, counted by hand; the time of a call; records, whole or not at all."""

import pytest
import torch
from harness.cases import Shape, draw_inputs
from harness.limits import limit_of
from harness.memory import held, peak

TOKENS = 2 * 3 * 5
SHAPES = {"segment": Shape("tiny", 2, 3, 5, 4, 7, 2), "step": Shape("step", 2, 3, 1, 4, 7, 2)}


@pytest.mark.parametrize(
    ("length", "rule", "kind", "numbers", "operations"),
    [
        ("segment", "sum", "forward", TOKENS * (4 + 4 + 7 + 7), TOKENS * 4 * 7 * 4),
        # The inputs again, the output's gradient, and a gradient for each input.
        ("segment", "sum", "forward+backward", TOKENS * (3 * (4 + 4 + 7) + 2 * 7), TOKENS * 4 * 7 * 14),
        ("segment", "decay", "forward+backward", TOKENS * (3 * (4 + 4 + 7 + 4 + 7) + 2 * 7), TOKENS * 4 * 7 * 23),
        ("segment", "kimi_delta", "forward+backward", TOKENS * (3 * (4 + 4 + 7 + 1 + 4) + 2 * 7), TOKENS * 4 * 7 * 27),
        # The pairs below the diagonal, of scores and of values.
        ("segment", "softmax", "forward", TOKENS * 4 * 7, 2 * 3 * (1 + 2 + 3 + 4 + 5) * (2 * 7 + 2 * 7)),
        ("step", "sum", "step", 2 * 3 * (4 + 4 + 7 + 7 + 2 * 4 * 7), 2 * 3 * 4 * 7 * 4),
    ],
)
def test_every_tensor_is_moved_once(length: str, rule: str, kind: str, numbers: int, operations: int) -> None:
    """At the bandwidth of a copy of about this size."""
    inputs = draw_inputs(SHAPES[length], torch.float32, "cpu")
    for copies, bandwidth in (
        ({"1000": 1.0}, 1.0),
        ({str(numbers): 1.0, str(13 * numbers): 4.0}, 4.0),
        ({"9": 1e9}, 1e9),
    ):
        limit = limit_of(SHAPES[length], rule, "float32", kind, inputs, {"copy": copies, "matmul": {"float32": 1e3}})
        assert (limit["bytes"], limit["operations"]) == (4 * numbers, operations)
        assert limit["binding"] == ("arithmetic" if bandwidth == 1e9 else "bandwidth")
        assert limit["seconds"] == (operations / 1e3 if bandwidth == 1e9 else 4 * numbers / bandwidth)


def test_the_peak_of_a_call_counts_what_lives_at_the_same_time() -> None:
    def megabytes(number: int) -> torch.Tensor:
        return torch.empty(number << 20, dtype=torch.uint8)

    def prepare() -> list[torch.Tensor]:
        megabytes(50)  # gone before the call
        return [megabytes(4)]

    def call(state: list[torch.Tensor]) -> torch.Tensor:
        first = megabytes(1)
        del first
        second, third = megabytes(1), megabytes(2)  # with the state, 7 in all
        del second
        state[0] = megabytes(1)  # in place of 4, once it is there
        return third

    assert peak(prepare, call, "cpu") == 7 << 20
    assert held({"a": [torch.zeros(3), None], "b": {"y": torch.zeros(2, dtype=torch.float64)}}) == 28
