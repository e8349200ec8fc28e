"""The ways to do a call on a GPU are found, told apart and asked for; here without a GPU."""

import os

import cuda_plans
import pytest
import torch
from cuda_plans import ALGORITHM, PLAN, Call, asking, call_of, ways_of
from harness.cases import RULES, Shape, draw_inputs

from fairseq_fastweights import ops
from fairseq_fastweights.ops import native

SMALL = Shape("small", 2, 3, 40, 8, 16, 2)
NUMBERS = (*cuda_plans.CHOICES, "segments")


def kernels(operation: str, sizes: tuple[int, ...], *_: object, **__: object) -> dict[str, int] | None:
    """Stands in for `native.cuda_plan`: chunks of 32 or 64, one stage, 128 threads, any number of segments."""
    asked = dict(word.split("=") for word in os.environ.get(PLAN, "").split())
    if os.environ.get(ALGORITHM) == "recurrent":
        return None
    plan = {name: int(asked.get(name, default)) for name, default in zip(NUMBERS, (64, 32, 1, 128, 4), strict=True)}
    possible = plan["chunk"] >= 32 and plan["columns"] <= 32 and plan["stages"] == 1 and plan["threads"] == 128
    return {**plan, "blocks": 1, "shared": 1000} if possible else None


def test_each_way_is_found_once_and_asked_for_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cuda_plan", kernels)
    monkeypatch.setenv(ALGORITHM, "recurrent")
    ways = ways_of(Call("diagonal_forward", (2, 40, 3, 8, 16, 64), torch.bfloat16, "sum", lambda: None), (9, 0))
    # The first is what is chosen if nobody asks.
    assert ways[0].environment == {} and ways[0].plan is not None and ways[0].plan["chunk"] == 64
    assert ways[1].plan is None and str(ways[1]) == "recurrent"
    plans = [(way.plan["chunk"], way.plan["columns"], way.plan["segments"]) for way in ways if way.plan is not None]
    tiles = {(chunk, columns, 4) for chunk in (32, 64) for columns in (16, 32)}
    assert set(plans) == tiles | {(64, 32, segments) for segments in cuda_plans.SEGMENTS}
    assert len({str(way) for way in ways}) == len(ways) == len(plans) + 1
    with asking(ways[-1].environment):
        assert kernels("", ()) == ways[-1].plan
    assert os.environ[ALGORITHM] == "recurrent" and PLAN not in os.environ


@pytest.mark.parametrize("kind", cuda_plans.PASSES)
@pytest.mark.parametrize("rule", RULES)
def test_the_operator_that_is_timed_is_the_rule(rule: str, kind: str) -> None:
    inputs = draw_inputs(SMALL, torch.float32, "cpu")
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])]
    out, _ = getattr(ops, f"{rule}_rule")(*leaves, backend="native")
    expected = [out] if kind == "forward" else torch.autograd.grad(out, leaves, inputs.d_out)
    for x in leaves:
        x.requires_grad_(False)
    call = call_of(SMALL, rule, kind, inputs)
    made = [x for x in call.run() if x.numel()]
    assert call.operation == f"{'delta' if rule == 'delta' else 'diagonal'}_{kind}"
    assert (call.sizes, call.rule) == ((2, 40, 3, 8, 16, 64), rule)
    for actual, wanted in zip(made, expected, strict=False):
        torch.testing.assert_close(actual, wanted)
