"""The ways to do a call on a GPU are found, told apart and asked for; here without a GPU."""

import csv
import os

import cuda_plans
import pytest
import torch
from cuda_plans import ALGORITHM, PLAN, call_of, ways_of
from harness.cases import Shape, draw_inputs

from fairseq_fastweights import ops
from fairseq_fastweights.ops import native

NUMBERS = (*cuda_plans.CHOICES, "segments")


def kernels(operation: str, sizes: tuple[int, ...], *_: object, **__: object) -> dict[str, int] | None:
    """Stands in for `native.cuda_plan`: chunks of 32 or 64, one stage, 128 threads, any number of segments."""
    asked = dict(word.split("=") for word in os.environ.get(PLAN, "").split())
    if os.environ.get(ALGORITHM) == "recurrent":
        return None
    plan = {name: int(asked.get(name, default)) for name, default in zip(NUMBERS, (64, 32, 1, 128, 4), strict=True)}
    possible = plan["chunk"] >= 32 and plan["columns"] <= 32 and plan["stages"] == 1 and plan["threads"] == 128
    return {**plan, "blocks": 1, "at_once": 2, "shared": 1000, "walk": int(asked.get("walk", 0))} if possible else None


@pytest.mark.parametrize(("kind", "results"), [("forward", 2), ("backward", 4)])
def test_each_way_to_do_a_pass_is_found_once_and_asked_for(kind: str, results: int, monkeypatch) -> None:
    monkeypatch.setattr(native, "cuda_plan", kernels)
    shape = Shape("small", 2, 3, 40, 8, 16, 2)
    call = call_of(shape, "delta", kind, draw_inputs(shape, torch.float32, "cpu"))
    assert (call.operation, call.sizes) == (f"delta_{kind}", (2, 40, 3, 8, 16, 64)) and len(call.run()) == results
    ways = ways_of(call, (9, 0))
    # The first is what is chosen if nobody asks.
    assert ways[0].environment == {} and ways[0].plan["chunk"] == 64 and str(ways[1]) == "recurrent"
    plans = [(way.plan["chunk"], way.plan["columns"], way.plan["segments"]) for way in ways if way.plan is not None]
    tiles = {(chunk, columns, 4) for chunk in (32, 64) for columns in (16, 32)}
    assert set(plans) == tiles | {(64, 32, segments) for segments in cuda_plans.SEGMENTS}
    assert len({str(way) for way in ways}) == len(ways) == len(plans) + 1
    monkeypatch.setattr(os, "environ", ways[-1].environment)
    assert kernels("", ()) == ways[-1].plan


def test_every_way_is_timed_written_down_and_held_against_steps_one_by_one(tmp_path, monkeypatch, run, capsys) -> None:
    monkeypatch.setattr(native, "cuda_plan", kernels)
    monkeypatch.setattr(cuda_plans, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_plans, "SHAPES", {"mt-big": Shape("mt-big", 2, 3, 40, 8, 16)})
    for name, answer in (("is_available", True), ("synchronize", None), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    path = tmp_path / "plans.csv"
    arguments = ("--rounds", 1, "--rules", "gated_delta", "--dtype", "float32", "--out", path)
    assert run("cuda_plans", *arguments) == ""
    [header, *lines] = csv.reader(path.open())
    assert header == [*"dtype shape rule pass interval".split(), *cuda_plans.NUMBERS, "ms"]
    ways = [line[5:12] for line in lines if line[:5] == ["float32", "mt-big", "gated_delta", "forward", "64"]]
    assert ["64", "32", "1", "1", "128", "4", "2"] in ways and [""] * 7 in ways and len(ways) * 2 == len(lines) > 10
    assert all(float(line[-1]) > 0 for line in lines)

    def wrong(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        out, state = ops.gated_delta_rule(*inputs, **options)
        return out * (1.1 if "chunk=32" in os.environ.get(PLAN, "") else 1), state

    monkeypatch.setattr(cuda_plans, "RULES", {"gated_delta": wrong})
    said = run("cuda_plans", *arguments)
    assert "error: these differ" in said and "mt-big, gated_delta, forward, 32 steps x 16 values" in said
    assert ": by 0.1" in said and ", 64 steps" not in said
