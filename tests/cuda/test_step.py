"""The step kernels, emulated: one token, the state updated in place through its strides."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.cuda.emulated import long
from tests.ops.agreement import assert_close
from tests.ops.results import definition
from tests.ops.rules import RULE, RULES, deal, state_dtype

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float64: 1e-14}


# Of keys and values, and of the tensor of sevens that the state is a part of.
SIZES = [
    *[(1, 1, (2, 4)), (3, 5, (4, 8)), (16, 16, (17, 19)), (64, 64, (65, 67)), (33, 70, (34, 73)), (300, 9, (301, 12))],
    *[(512, 40, (513, 43)), (4, 512, (5, 515)), (64, 64, (64, 64)), (12, 20, (12, 20))],
]


@pytest.mark.parametrize(
    ("rule", "size", "dtype"), long(list(product(RULES, SIZES, TOLERANCE)), short=deal(RULES, SIZES, list(TOLERANCE)))
)
def test_every_shape(small_emulator, rule, size, dtype):
    K, V, (rows, columns) = size
    inputs = rule.inputs(B=3, T=1, K=K, V=V, dtype=dtype, requires_grad=False)
    whole = torch.full((3, 2, rows, columns), 7.0, dtype=state_dtype(dtype))
    before = int(columns > V)
    state = whole[:, :, :K, before : V + before].copy_(inputs["initial_state"])
    out = small_emulator.step_(inputs, state)
    assert_close({"out": out, "final_state": state}, definition(rule, inputs, None), TOLERANCE[dtype])
    state.fill_(7)
    assert bool((whole == 7).all()), "written outside the state"


@pytest.mark.parametrize("regime", RULE["gated"].regimes)
@pytest.mark.parametrize("complement", [True, False])
def test_every_gate(small_emulator, regime, complement):
    inputs = RULE["gated"].inputs(T=1, K=6, V=5, regime=regime, requires_grad=False)
    state = inputs["initial_state"].clone()
    out = small_emulator.step_(inputs, state, complement)
    if complement:
        expected = definition(RULE["gated"], inputs, None)
    else:
        spread = {n: x for n, x in inputs.items() if n != "log_gate"} | {"log_value_decay": None}
        spread["log_key_decay"] = inputs["log_gate"][..., None].expand(-1, -1, -1, 6)
        expected = definition(RULE["decay"], spread, None)
    assert_close({"out": out, "final_state": state}, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("rule", [RULE["decay"], RULE["delta"]])
def test_threads_may_run_in_any_order(small_emulator, rule):
    inputs = rule.inputs(T=1, K=100, V=40, requires_grad=False)
    results = []
    for seed in (0, 1, 7):
        state = inputs["initial_state"].clone()
        with small_emulator.schedule(seed):
            results.append((small_emulator.step_(inputs, state), state))
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(state, results[0][1])


def test_no_batch(small_emulator):
    rule = RULE["delta"]
    inputs = rule.inputs(B=0, T=1, requires_grad=False)
    state = torch.zeros(0, 2, 5, 3, dtype=state_dtype(torch.float32))
    assert small_emulator.step_(inputs, state).shape == (0, 1, 2, 3)
