"""A case's bytes and operations, counted by hand; its computation; the memory of a call."""

import pytest
import torch
from harness.cases import RULES, Shape, draw_inputs
from harness.contestants import all_contestants
from harness.limits import limit_of
from harness.memory import held, peak

TOKENS, ENTRIES = 2 * 3 * 5, 4 * 7
BOTH = "forward+backward"


@pytest.mark.parametrize(
    ("time", "rule", "kind", "numbers", "operations"),
    [
        (5, "sum", "forward", TOKENS * (4 + 4 + 7 + 7), TOKENS * ENTRIES * 4),
        # The inputs again, the output's gradient, and a gradient for each input.
        (5, "sum", BOTH, TOKENS * (3 * (4 + 4 + 7) + 2 * 7), TOKENS * ENTRIES * 14),
        (5, "decay", BOTH, TOKENS * (3 * (4 + 4 + 7 + 4 + 7) + 2 * 7), TOKENS * ENTRIES * 23),
        (5, "kimi_delta", BOTH, TOKENS * (3 * (4 + 4 + 7 + 1 + 4) + 2 * 7), TOKENS * ENTRIES * 27),
        # The pairs below the diagonal, of scores and of values.
        (5, "softmax", "forward", TOKENS * 4 * 7, 2 * 3 * (1 + 2 + 3 + 4 + 5) * (2 * 7 + 2 * 7)),
        (1, "sum", "step", 2 * 3 * (4 + 4 + 7 + 7 + 2 * ENTRIES), 2 * 3 * ENTRIES * 4),
    ],
)
def test_every_tensor_is_moved_once(time: int, rule: str, kind: str, numbers: int, operations: int) -> None:
    """At the bandwidth of a copy of about this size."""
    shape = Shape("tiny", 2, 3, time, 4, 7, 2)
    inputs = draw_inputs(shape, torch.float32, "cpu")
    slow, fast = {str(numbers): 1.0, str(13 * numbers): 4.0}, {"9": 1e9}
    for copies, binding, seconds in ((slow, "bandwidth", numbers), (fast, "arithmetic", operations / 1e3)):
        limit = limit_of(shape, rule, "float32", kind, inputs, {"copy": copies, "matmul": {"float32": 1e3}})
        assert limit == {"bytes": 4 * numbers, "operations": operations, "seconds": seconds, "binding": binding}


@pytest.mark.parametrize("time", [5, 1])
@pytest.mark.parametrize("rule", RULES)
def test_our_backends_get_all_gates_and_the_state(rule: str, time: int) -> None:
    shape = Shape("tiny", 2, 3, time, 4, 6, 2)
    inputs = draw_inputs(shape, torch.float32, "cpu")
    work = all_contestants([rule], "cpu")[0].prepare(shape, inputs)
    arguments = (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])
    expected, _ = RULES[rule](*arguments, initial_state=inputs.state, backend="reference")
    # Other ways to the same sums, in float32.
    torch.testing.assert_close(work.as_reference(work.run_forward()), expected, rtol=1e-5, atol=1e-5)
    assert len(work.inputs) == 3 + len(RULES[rule].gates)
    if not shape.steps:
        assert [g.shape for g in work.run_both()] == [x.shape for x in work.inputs]
        assert all(x.is_contiguous() for x in (*work.inputs, work.d_out))


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
