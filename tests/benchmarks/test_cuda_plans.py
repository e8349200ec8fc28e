"""The ways to do a call on a GPU are found, told apart and asked for; here without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import cuda_plans
import pytest
import torch
from cuda_plans import ALGORITHM, PLAN, Call, Way, asking, call_of, ways_of
from harness import records
from harness.cases import RULES, SHAPES, Shape, draw_inputs
from harness.timing import Clock

from fairseq_fastweights import ops
from fairseq_fastweights.ops import native
from tests.benchmarks.conftest import Run

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


def test_a_call_is_timed_in_every_way_and_the_table_tells_what_the_choice_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """On a CPU that passes for a GPU on which the chosen way takes twice the time of the recurrent one."""

    class FakeClock(Clock):
        def seconds(self, call: Any, repeats: int, host: float = 0.0) -> float:
            call()
            return 1e-3 if str(call.args[0]) == "recurrent" else 2e-3

    for name, value in (("is_available", True), ("get_device_capability", (9, 0)), ("synchronize", None)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(native, "cuda_plan", kernels)
    monkeypatch.setattr(records, "_machine", lambda device: {})
    monkeypatch.setattr(cuda_plans, "CudaClock", FakeClock)
    monkeypatch.setattr(cuda_plans, "SHAPES", {"long": SMALL})
    monkeypatch.setattr(cuda_plans, "draw_inputs", lambda *given: draw_inputs(*given[:2], "cpu"))
    out, printed = tmp_path / "plans.json", []
    monkeypatch.setattr("builtins.print", printed.append)
    assert run("cuda_plans", "--rules", "sum", "--dtype", "float32", "--out", out) == ""
    rows = json.loads(out.read_text())["rows"]
    assert [row["operation"] for row in rows if row["chosen"]] == ["diagonal_forward", "diagonal_backward"]
    assert {row["seconds"]["rounds"] for row in rows} == {5} and rows[0]["sizes"]["interval"] == 64
    first, second = printed[0].splitlines()[2:]
    assert "long, sum, forward" in first and "recurrent" in first and "2.00 ms" in first and "2.00 x" in first
    assert "long, sum, backward" in second


def test_every_shape_has_its_turn_once_those_that_matter_first() -> None:
    shapes = cuda_plans.shapes_in_order()
    assert sorted(shapes) == sorted(name for name, shape in SHAPES.items() if not shape.steps)
    assert shapes[: len(cuda_plans.ORDER)] == list(cuda_plans.ORDER)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in run("cuda_plans")


def test_a_way_names_itself() -> None:
    plan = {"chunk": 64, "columns": 32, "blocks": 2, "stages": 2, "threads": 256, "segments": 1, "shared": 9}
    assert str(Way(plan, {})) == "64 steps x 32 values, stages 2, threads 256"
    assert str(Way({**plan, "segments": 8}, {})).endswith("threads 256, segments 8")
