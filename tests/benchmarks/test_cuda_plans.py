"""The plans of a call on a GPU are found, requested and timed, here without a GPU."""

import csv
import os

import cuda_plans
import torch
from cuda_plans import ALGORITHM, PLAN
from harness.cases import Shape

from fairseq_fastweights import ops
from fairseq_fastweights.ops import kernels

NUMBERS = (*cuda_plans.CHOICES, "segments")
TILES = {(columns, stages, 4) for columns in (16, 32) for stages in (1, 2)}


def plan(operation: str, sizes: tuple[int, ...], *_: object, **__: object) -> dict[str, int] | None:
    """Stands in for `kernels.cuda_plan`: up to 32 columns and 2 stages, any number of segments."""
    assert operation in ("delta_forward", "delta_backward") and sizes == (2, 40, 3, 8, 16, 64)
    asked = dict(word.split("=") for word in os.environ.get(PLAN, "").split())
    if os.environ.get(ALGORITHM) == "recurrent":
        return None
    plan = {name: int(asked.get(name, default)) for name, default in zip(NUMBERS, (32, 2, 4), strict=True)}
    possible = plan["columns"] <= 32 and plan["stages"] <= 2
    return {**plan, "blocks": 1, "threads": 2 * plan["columns"], "shared": 1000} if possible else None


def test_every_plan_is_timed_and_compared_with_the_recurrent_kernels(tmp_path, monkeypatch, run, capsys) -> None:
    monkeypatch.setattr(kernels, "cuda_plan", plan)
    monkeypatch.setattr(cuda_plans, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_plans, "SHAPES", {"mt-big": Shape("mt-big", 2, 3, 40, 8, 16)})
    for name, answer in (("is_available", True), ("synchronize", None), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    path = tmp_path / "plans.csv"
    arguments = ("--rounds", 1, "--rules", "gated_delta", "--dtype", "float32", "--out", path)
    assert run("cuda_plans", *arguments) == ""
    lines = list(csv.DictReader(path.open()))
    assert list(lines[0]) == [*"dtype shape rule pass interval".split(), "recurrent ms", *cuda_plans.NUMBERS, "ms"]
    for kind in ("forward", "backward"):
        ways = [line for line in lines if line["pass"] == kind]
        assert all(float(way[ms]) > 0 for way in ways for ms in ("ms", "recurrent ms"))
        # The default choice comes first; each plan is there once.
        plans = [tuple(int(way[name]) for name in NUMBERS) for way in ways]
        assert plans[0] == (32, 2, 4) and len(plans) == len(set(plans))
        assert set(plans) == TILES | {(32, 2, segments) for segments in cuda_plans.SEGMENTS}
        assert {(way["shape"], way["rule"], way["interval"]) for way in ways} == {("mt-big", "gated_delta", "64")}

    def wrong(*inputs: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        out, state = ops.gated_delta_rule(*inputs, **options)
        return out * (1.1 if "columns=16" in os.environ.get(PLAN, "") else 1), state

    monkeypatch.setattr(cuda_plans, "RULES", {"gated_delta": wrong})
    said = run("cuda_plans", *arguments)
    assert "error: these differ" in said and "mt-big, gated_delta, forward, 16 values" in said
    assert ": by 0.1" in said and ", 32 values" not in said
