"""The ways to do a call on a GPU are found, told apart, asked for and timed; here without a GPU."""

import csv
import os

import cuda_plans
import torch
from cuda_plans import ALGORITHM, PLAN
from harness.cases import Shape

from fairseq_fastweights import ops
from fairseq_fastweights.ops import native

NUMBERS = (*cuda_plans.CHOICES, "segments")
TILES = {(chunk, columns, 4) for chunk in (32, 64) for columns in (16, 32)}


def kernels(operation: str, sizes: tuple[int, ...], *_: object, **__: object) -> dict[str, int] | None:
    """Stands in for `native.cuda_plan`: chunks of 32 or 64, one stage, 128 threads, any number of segments."""
    assert operation in ("delta_forward", "delta_backward") and sizes == (2, 40, 3, 8, 16, 64)
    asked = dict(word.split("=") for word in os.environ.get(PLAN, "").split())
    if os.environ.get(ALGORITHM) == "recurrent":
        return None
    plan = {name: int(asked.get(name, default)) for name, default in zip(NUMBERS, (64, 32, 1, 128, 4), strict=True)}
    possible = plan["chunk"] >= 32 and plan["columns"] <= 32 and plan["stages"] == 1 and plan["threads"] == 128
    return {**plan, "blocks": 1, "at_once": 2, "shared": 1000, "walk": int(asked.get("walk", 0))} if possible else None


def test_every_way_is_timed_written_down_and_held_against_steps_one_by_one(tmp_path, monkeypatch, run, capsys) -> None:
    monkeypatch.setattr(native, "cuda_plan", kernels)
    monkeypatch.setattr(cuda_plans, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_plans, "SHAPES", {"mt-big": Shape("mt-big", 2, 3, 40, 8, 16)})
    for name, answer in (("is_available", True), ("synchronize", None), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    path = tmp_path / "plans.csv"
    arguments = ("--rounds", 1, "--rules", "gated_delta", "--dtype", "float32", "--out", path)
    assert run("cuda_plans", *arguments) == ""
    lines = list(csv.DictReader(path.open()))
    assert list(lines[0]) == [*"dtype shape rule pass interval".split(), *cuda_plans.NUMBERS, "ms"]
    for kind in ("forward", "backward"):
        ways = [line for line in lines if line["pass"] == kind and line["walk"] != "1"]
        assert sum(line["pass"] == kind and float(line["ms"]) > 0 for line in lines) == len(ways) + 2
        # The first is what is chosen if nobody asks; each is there once.
        plans = [tuple(int(way[name]) for name in ("chunk", "columns", "segments")) for way in ways if way["chunk"]]
        assert plans[0] == (64, 32, 4) and ways[1]["chunk"] == "" and len(plans) == len(set(plans)) == len(ways) - 1
        assert set(plans) == TILES | {(64, 32, segments) for segments in cuda_plans.SEGMENTS}
        assert {(way["shape"], way["rule"], way["interval"]) for way in ways} == {("mt-big", "gated_delta", "64")}

    def wrong(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        out, state = ops.gated_delta_rule(*inputs, **options)
        return out * (1.1 if "chunk=32" in os.environ.get(PLAN, "") else 1), state

    monkeypatch.setattr(cuda_plans, "RULES", {"gated_delta": wrong})
    said = run("cuda_plans", *arguments)
    assert "error: these differ" in said and "mt-big, gated_delta, forward, 32 steps x 16 values" in said
    assert ": by 0.1" in said and ", 64 steps" not in said
