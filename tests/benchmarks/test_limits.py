from __future__ import annotations

import pytest
import torch
from harness.cases import RULES, Shape, draw_inputs
from harness.limits import bandwidth, limit_of, measure_rates
from harness.timing import CpuClock

SHAPE = Shape("tiny", 2, 3, 5, 4, 7, 2, "a test")
TOKENS = 2 * 3 * 5
RATES = {"copy": {"1000": 1.0, "1000000": 4.0}, "matmul": {"float32": 1e3}}


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [("sum", 4 + 4 + 7), ("gated", 4 + 4 + 7 + 1), ("decay", 4 + 4 + 7 + 4 + 7), ("delta", 4 + 4 + 7 + 1)],
)
def test_every_tensor_is_moved_once(rule: str, numbers: int) -> None:
    inputs = draw_inputs(SHAPE, torch.float32, "cpu")
    forward = limit_of(SHAPE, rule, "float32", "forward", inputs, RATES)
    assert forward.bytes == 4 * TOKENS * (numbers + 7)
    # The inputs again, the output's gradient, and a gradient for each input.
    both = limit_of(SHAPE, rule, "float32", "forward+backward", inputs, RATES)
    assert both.bytes == 4 * TOKENS * (3 * numbers + 2 * 7)


def test_the_sum_rule_writes_and_reads_a_state() -> None:
    inputs = draw_inputs(SHAPE, torch.float32, "cpu")
    limit = limit_of(SHAPE, "sum", "float32", "forward", inputs, RATES)
    assert limit.operations == TOKENS * 4 * 7 * 4
    assert limit.binding == "bandwidth" and limit.seconds == limit.bytes / 1.0
    fast_memory = {**RATES, "copy": {"1000": 1e9}}
    limit = limit_of(SHAPE, "sum", "float32", "forward", inputs, fast_memory)
    assert limit.binding == "arithmetic" and limit.seconds == limit.operations / 1e3


def test_attention_counts_the_pairs_below_the_diagonal() -> None:
    inputs = draw_inputs(SHAPE, torch.float32, "cpu")
    limit = limit_of(SHAPE, "softmax", "float32", "forward", inputs, RATES)
    assert limit.operations == 2 * 3 * (1 + 2 + 3 + 4 + 5) * (2 * 7 + 2 * 7)
    assert limit.bytes == 4 * TOKENS * 4 * 7


def test_a_step_reads_and_writes_the_state() -> None:
    step = Shape("step", 2, 3, 1, 4, 7, 2, "a test")
    inputs = draw_inputs(step, torch.float32, "cpu")
    limit = limit_of(step, "sum", "float32", "step", inputs, RATES)
    assert limit.bytes == 4 * 2 * 3 * (4 + 4 + 7 + 7 + 2 * 4 * 7)


def test_the_bandwidth_is_that_of_a_copy_of_about_this_size() -> None:
    assert bandwidth(RATES, 100) == 1.0
    assert bandwidth(RATES, 20_000) == 1.0
    assert bandwidth(RATES, 40_000) == 4.0


def test_rates_are_measured() -> None:
    rates = measure_rates("cpu", {"float32": torch.float32}, CpuClock(), quick=True)
    assert all(rate > 1e6 for kind in rates.values() for rate in kind.values())


def test_inputs_are_what_the_rules_ask_for() -> None:
    inputs = draw_inputs(SHAPE, torch.bfloat16, "cpu")
    assert all(gate.dtype == torch.bfloat16 for rule in RULES for gate in inputs.gates(rule))
    assert all(float(gate.max()) <= 0 for rule in ("gated", "decay") for gate in inputs.gates(rule))
    torch.testing.assert_close(inputs.k.float().norm(dim=-1), torch.ones(2, 5, 3), atol=1e-2, rtol=0)
