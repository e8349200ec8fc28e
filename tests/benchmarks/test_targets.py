"""Targets are met, missed by a factor, or unmeasured for a reason: on made-up numbers."""

from __future__ import annotations

from typing import Any

import pytest
from harness.peers.causal_product import FLAGS
from harness.targets import Comparison, Target, evaluate, evaluate_one, judge, render

AT_LEAST = Target("CPU", "speed", 1.5)
AT_MOST = Target("CPU", "time", 2.0, "at most")


@pytest.mark.parametrize(
    ("target", "values", "state", "measured", "comment"),
    [
        (AT_LEAST, [1.5], "met", "1.50 x (a)", ""),
        (AT_LEAST, [3.0, 1.6, 2.0], "met", "1.60 x (b); median of 3: 2.00 x", ""),
        (AT_LEAST, [3.0, 1.0], "missed", "1.00 x (b); median of 2: 2.00 x", "by a factor of 1.50; reached by 1 of 2"),
        (AT_MOST, [2.0, 1.0], "met", "2.00 x (a); median of 2: 1.50 x", ""),
        (AT_MOST, [3.0], "missed", "3.00 x (a)", "by a factor of 1.50"),
        (AT_LEAST, [2.0, None], "met", "2.00 x (a)", "unmeasured: b (no b)"),
        (AT_LEAST, [None, 1.0], "missed", "1.00 x (b)", "by a factor of 1.50; unmeasured: a (no a)"),
        (AT_LEAST, [None, None], "unmeasured", "", "no a; no b"),
        (AT_LEAST, [], "unmeasured", "", "there are no results"),
    ],
)  # fmt: skip
def test_the_worst_of_what_was_measured_counts(
    target: Target, values: list[float | None], state: str, measured: str, comment: str
) -> None:
    labels = "abc"[: len(values)]
    comparisons = [Comparison(n, x, "" if x is not None else f"no {n}") for n, x in zip(labels, values, strict=True)]
    verdict = judge(target, comparisons)
    assert (verdict.state, verdict.measured, verdict.comment) == (state, measured, comment)


def row(
    shape: str, kind: str, implementation: str, rule: str, median: float, dtype: str = "float32", **more: Any
) -> Any:
    return {
        "shape": shape,
        "dtype": dtype,
        "pass": kind,
        "implementation": implementation,
        "rule": rule,
        "status": "measured",
        "seconds": {"median": median},
        "first call": 0.012,
        "second call": 0.010,
        "limit": {"seconds": 0.7, "binding": "bandwidth"},
        **more,
    }


def cpu_record(causal_product: float = 1.6, delta: float = 1.8, **changes: Any) -> dict[str, Any]:
    """The sum rule takes a second everywhere."""
    rows = []
    for shape in ("lm-small", "lm-medium", "mt-big", "attention"):
        for kind in ("forward", "forward+backward"):
            times = {"sum": 1.0, "gated": 1.2, "decay": 1.5, "delta": delta}
            rows += [row(shape, kind, "native", rule, time) for rule, time in times.items()]
            rows += [row(shape, kind, "chunkwise", rule, 10.0) for rule in times]
            rows.append(row(shape, kind, "causal_product", "sum", causal_product))
            rows.append(row(shape, kind, "SDPA", "softmax", 9.5))
    build = {"flags": list(FLAGS)}
    return {"program": "kernels", "device": "cpu", "threads": 2, "causal_product": build, "rows": rows, **changes}


def states(record: dict[str, Any]) -> dict[str, str]:
    return {verdict.target.what: verdict.state for verdict in evaluate_one(record)}


SUM = "sum rule against causal_product, forward and forward+backward"
DECAY = "decay and delta: time over that of sum, paper shapes"
CHUNKWISE = "decay and delta against chunkwise, lm-small"
SOFTMAX = "SDPA at T = 1024, d = 64, forward+backward"
FIRST = "first call beyond the second"


def test_targets_of_the_kernels_on_a_cpu() -> None:
    assert states(cpu_record()) == {SUM: "met", DECAY: "met", CHUNKWISE: "met", SOFTMAX: "met", FIRST: "met"}
    slow = states(cpu_record(causal_product=1.4, delta=2.1))
    assert slow == {SUM: "missed", DECAY: "missed", CHUNKWISE: "missed", SOFTMAX: "missed", FIRST: "met"}


@pytest.mark.parametrize("build", [None, {"flags": ["-O2"]}])
def test_the_peer_must_have_been_compiled_for_the_comparison(build: dict[str, Any] | None) -> None:
    verdict = evaluate_one(cpu_record(causal_product=1.6) | {"causal_product": build})[0]
    assert verdict.target.what == SUM
    assert verdict.state == "unmeasured" and "flags are unknown" in verdict.comment


def test_without_native_kernels_the_reason_is_given() -> None:
    record = cpu_record()
    for entry in record["rows"]:
        if entry["implementation"] == "native":
            entry |= {"status": "unavailable", "message": "not built"}
    verdicts = evaluate_one(record)
    assert {v.state for v in verdicts} == {"unmeasured"}
    assert all(v.comment == "native: not built" for v in verdicts)


def generation_record(growth: float) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for model, base, slope in (("transformer", 1.0, 1e-3), ("delta", 1.0, growth), ("sum", 0.9, 0.0)):
        for length in (64, 1000, 4000):
            seconds = {"median": base * (1 + slope * length)}
            rows.append({"model": model, "length": length, "seconds": seconds})
            if model != "transformer":
                rows[-1]["seconds beside other lengths"] = seconds
    return {"program": "generation", "device": "cpu", "threads": 2, "settings": {"batch": 8}, "rows": rows}


@pytest.mark.parametrize(("growth", "expected"), [(0.0, ["met", "met", "met"]), (5e-4, ["missed", "missed", "missed"])])
def test_targets_of_generation(growth: float, expected: list[str]) -> None:
    verdicts = evaluate_one(generation_record(growth))
    assert [verdict.state for verdict in verdicts] == expected
    assert verdicts[2].target.what.endswith("longest time over shortest, after 64 to 4,000 tokens")


@pytest.mark.parametrize("length", [64, 1000, 4000])
def test_a_token_is_flat_if_no_length_stands_out(length: int) -> None:
    record = generation_record(0.0)
    (row,) = (row for row in record["rows"] if (row["model"], row["length"]) == ("sum", length))
    row["seconds beside other lengths"] = {"median": 1.2 * row["seconds"]["median"]}
    assert [verdict.state for verdict in evaluate_one(record)] == ["met", "met", "missed"]


def translation_record(growth: float) -> dict[str, Any]:
    rows = [
        {"model": model, "beam": beam, "source": source, "length": length, "seconds": {"median": 1 + slope * length}}
        for model, slope in (("transformer", 1e-3), ("elu", growth), ("dpfp-2", 0.0))
        for beam in (1, 4)
        for source, length in ((64, 64), (64, 1024), (64, 2048), (1024, 1024))
    ]
    settings = {"hypotheses": 8, "source": 64}
    return {"program": "translation", "device": "cpu", "threads": 2, "settings": settings, "rows": rows}


@pytest.mark.parametrize(("growth", "expected"), [(0.0, ["met", "met"]), (5e-4, ["missed", "missed"])])
def test_targets_of_translation(growth: float, expected: list[str]) -> None:
    verdicts = evaluate_one(translation_record(growth))
    assert [verdict.state for verdict in verdicts] == expected
    assert "; median of 8: 2.02 x" in evaluate_one(translation_record(0.0))[0].measured
    assert verdicts[1].target.what.endswith("time after 2,048 tokens over that after 64")


def test_a_translation_that_was_not_measured_is_named() -> None:
    record = translation_record(0.0)
    record["rows"] = [row for row in record["rows"] if row["source"] == 64]
    verdict = evaluate_one(record)[0]
    assert verdict.state == "met"
    assert "unmeasured: elu, beam 1, source of 1,024" in verdict.comment


def gpu_record(peer: float = 1.1, float32: float = 2.0, extra: int = 20) -> dict[str, Any]:
    memory = {"extra": extra, "tensors": 100}
    rows = [
        entry
        for shape in ("lm-small", "retnet")
        for entry in (
            row(shape, "forward+backward", "native", "delta", 1.0, "bfloat16", memory=memory),
            row(shape, "forward+backward", "native", "delta", float32, memory=memory),
            row(shape, "forward+backward", "fla chunk_delta_rule", "delta", peer, "bfloat16", memory=memory),
            row(shape, "forward+backward", "SDPA", "softmax", 1.5, "bfloat16", memory=memory),
        )
    ]
    return {"program": "kernels", "device": "cuda", "threads": 2, "rows": rows}


def test_targets_of_the_kernels_on_a_gpu() -> None:
    verdicts = evaluate_one(gpu_record())
    assert [verdict.state for verdict in verdicts] == ["met"] * 6
    assert verdicts[0].measured.startswith("1.10 x") and "sum, lm-small" in verdicts[0].comment
    assert verdicts[1].measured.startswith("70%")
    verdicts = evaluate_one(gpu_record(peer=0.9, float32=3.0, extra=30))
    # 30% is too much for lm-small, and nothing to retnet.
    assert [verdict.state for verdict in verdicts] == ["missed", "met", "missed", "missed", "met", "met"]


def test_targets_of_training_on_a_gpu() -> None:
    speeds = {"softmax": 100.0, "delta": 260.0, "sum": 240.0}
    rows = [{"model": model, "words per second": {"median": speed}} for model, speed in speeds.items()]
    [verdict] = evaluate_one({"program": "training", "device": "cuda", "rows": rows})
    assert (verdict.state, verdict.measured) == ("missed", "2.40 x (sum); median of 2: 2.50 x")
    assert evaluate_one({"program": "training", "device": "cpu", "rows": rows}) == []


def test_without_results_all_rows_are_there_and_unmeasured() -> None:
    verdicts = evaluate([])
    assert len(verdicts) == 17 and {verdict.state for verdict in verdicts} == {"unmeasured"}
    table = render(verdicts).splitlines()
    assert len(table) == 2 + 17
    assert all("unmeasured: " in line for line in table[2:])
    assert "unmeasured: kernels.py was not run on a GPU" in table[-2]


def test_records_are_judged_together() -> None:
    verdicts = evaluate([generation_record(0.0), cpu_record()])
    assert [v.state for v in verdicts].count("met") == 8
    assert "met" in render(verdicts) and render([]) == ""
