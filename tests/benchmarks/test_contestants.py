"""Contestants get inputs in their own layout and do what they are compared with."""

import pytest
import torch
from harness import contestants
from harness.cases import RULES, Shape, draw_inputs


@pytest.mark.parametrize("shape", [Shape("tiny", 2, 3, 5, 4, 6, 2), Shape("step", 2, 3, 1, 4, 6, 2)])
@pytest.mark.parametrize("rule", RULES)
def test_our_backends_get_all_gates_and_the_state(rule: str, shape: Shape) -> None:
    inputs = draw_inputs(shape, torch.float32, "cpu")
    work = contestants.all_contestants([rule], "cpu")[0].prepare(shape, inputs)
    arguments = (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])
    expected, _ = RULES[rule](*arguments, initial_state=inputs.state, backend="reference")
    # Other ways to the same sums, in float32.
    torch.testing.assert_close(work.as_reference(work.run_forward()), expected, rtol=1e-5, atol=1e-5)
    assert len(work.inputs) == 3 + len(RULES[rule].gates)
    if not shape.steps:
        assert [g.shape for g in work.run_both()] == [x.shape for x in work.inputs]
        assert all(x.is_contiguous() for x in (*work.inputs, work.d_out))
