"""Targets are met, missed by a factor, or unmeasured for a reason: on made-up numbers."""

from __future__ import annotations

from typing import Any

import pytest
from harness.contestants import BUILD_FLAGS
from harness.targets import Target, evaluate, evaluate_one, judge, render

LEAST = Target("at least", 1.5, lambda results: [])
MOST = Target("at most", 2.0, lambda results: [])


@pytest.mark.parametrize(
    ("target", "values", "measured", "verdict"),
    [
        (LEAST, [1.5], "1.50 x (a)", "met"),
        (LEAST, [3.0, 1.6, 2.0], "1.60 x (b); median of 3: 2.00 x", "met"),
        (LEAST, [3.0, 1.0], "1.00 x (b); median of 2: 2.00 x", "missed: by a factor of 1.50; reached by 1 of 2"),
        (MOST, [2.0, 1.0], "2.00 x (a); median of 2: 1.50 x", "met"),
        (MOST, [3.0], "3.00 x (a)", "missed: by a factor of 1.50"),
        (LEAST, [2.0, "no"], "2.00 x (a)", "met: unmeasured: b (no)"),
        (LEAST, ["no", 1.0], "1.00 x (b)", "missed: by a factor of 1.50; unmeasured: a (no)"),
        (LEAST, ["no", "none", "no"], "–", "unmeasured: no; none"),
        (LEAST, [3.0, *["no"] * 4], "3.00 x (a)", "met: unmeasured: b, c, d and 1 more (no)"),
        (LEAST, [], "–", "unmeasured: there are no results"),
    ],
)  # fmt: skip
def test_the_worst_of_what_was_measured_counts(target: Target, values: list[Any], measured: str, verdict: str) -> None:
    assert judge(target, list(zip("abcde", values, strict=False))) == (measured, verdict)


def row(shape: str, kind: str, implementation: str, rule: str, median: float, dtype: str = "float32", **more: Any) -> Any:
    name = {"shape": shape, "dtype": dtype, "pass": kind, "implementation": implementation, "rule": rule}
    calls = {"first call": 0.012, "second call": 0.010}
    limit = {"seconds": 0.7, "binding": "bandwidth"}
    return {**name, "status": "measured", "seconds": {"median": median}, **calls, "limit": limit, **more}


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
    build = {"flags": list(BUILD_FLAGS)}
    return {"program": "kernels", "device": "cpu", "threads": 2, "causal_product": build, "rows": rows, **changes}


def generation_record(growth: float, beside: int = 0) -> dict[str, Any]:
    """`beside` is a length at which the sum rule's token takes a fifth longer, beside the others."""
    rows: list[dict[str, Any]] = []
    for model, base, slope in (("transformer", 1.0, 1e-3), ("delta", 1.0, growth), ("sum", 0.9, 0.0)):
        for length in (64, 1000, 4000):
            seconds = {"median": base * (1 + slope * length)}
            rows.append({"model": model, "length": length, "seconds": seconds})
            if model != "transformer":
                late = 1.2 if (model, length) == ("sum", beside) else 1.0
                rows[-1]["seconds beside other lengths"] = {"median": late * seconds["median"]}
    return {"program": "generation", "device": "cpu", "threads": 2, "settings": {"batch": 8}, "rows": rows}


def translation_record(growth: float, sources: tuple[int, ...] = (64, 1024)) -> dict[str, Any]:
    rows = [
        {"model": model, "beam": beam, "source": source, "length": length, "seconds": {"median": 1 + slope * length}}
        for model, slope in (("transformer", 1e-3), ("elu", growth), ("dpfp-2", 0.0))
        for beam in (1, 4)
        for source, length in ((64, 64), (64, 1024), (64, 2048), (1024, 1024))
        if source in sources
    ]
    settings = {"hypotheses": 8, "source": 64}
    return {"program": "translation", "device": "cpu", "threads": 2, "settings": settings, "rows": rows}


def gpu_record(peer: float = 1.1, float32: float = 2.0, extra: int = 20) -> dict[str, Any]:
    memory = {"extra": extra, "tensors": 100}
    rows = []
    for shape in ("lm-small", "retnet"):
        own = (shape, "forward+backward", "native", "delta")
        rows += [row(*own, 1.0, "bfloat16", memory=memory), row(*own, float32, memory=memory)]
        rows += [row(shape, own[1], "fla chunk_delta_rule", "delta", peer, "bfloat16")]
        rows += [row(shape, own[1], "SDPA", "softmax", 1.5, "bfloat16"), row(shape, own[1], "fla", "sum", 0.1, "bfloat16")]
    return {"program": "kernels", "device": "cuda", "threads": 2, "rows": rows}


def training_record(device: str) -> dict[str, Any]:
    speeds = {"softmax": 100.0, "delta": 260.0, "sum": 240.0}
    rows = [{"model": model, "words per second": {"median": speed}} for model, speed in speeds.items()]
    return {"program": "training", "device": device, "threads": 1, "rows": rows}


@pytest.mark.parametrize(
    ("record", "missed"),
    [
        (cpu_record(), [0, 0, 0, 0, 0]),
        (cpu_record(causal_product=1.4), [1, 0, 0, 0, 0]),
        (cpu_record(delta=1.92), [0, 0, 0, 1, 0]),
        (cpu_record(delta=2.1), [0, 1, 1, 1, 0]),
        (generation_record(0.0), [0, 0, 0]),
        (generation_record(5e-4), [1, 1, 1]),
        *[(generation_record(0.0, beside), [0, 0, 1]) for beside in (64, 1000, 4000)],
        (translation_record(0.0), [0, 0]),
        (translation_record(5e-4), [1, 1]),
        (gpu_record(), [0, 0, 0, 0, 0, 0]),
        # 30% is too much for lm-small, and nothing to retnet.
        (gpu_record(peer=0.9, float32=3.0, extra=30), [1, 0, 1, 1, 0, 0]),
        (training_record("cuda"), [1]),
        (training_record("cpu"), []),
    ],
)
def test_each_target_holds_its_own_numbers_against_its_limit(record: dict[str, Any], missed: list[int]) -> None:
    states = [verdict.verdict.partition(":")[0] for verdict in evaluate_one(record)]
    assert states == ["missed" if each else "met" for each in missed]


@pytest.mark.parametrize(
    ("record", "number", "text"),
    [
        (generation_record(0.0), 2, "CPU, 2 threads, batch of 8 | a generated token, flat: longest time over shortest, after 64 to 4,000 tokens"),
        (translation_record(0.0), 0, "; median of 8: 2.02 x"),
        (translation_record(0.0), 1, "time after 2,048 tokens over that after 64"),
        (translation_record(0.0, (64,)), 0, "met: unmeasured: elu, beam 1, source of 1,024"),
        (gpu_record(), 0, "1.10 x (delta, "),
        (gpu_record(), 0, "met: unmeasured: sum, lm-small"),
        (gpu_record(), 1, "70%"),
        (training_record("cuda"), 0, "2.40 x (sum); median of 2: 2.50 x"),
        (cpu_record(causal_product=1.6) | {"causal_product": None}, 0, "unmeasured: causal_product is not the build of"),
        (cpu_record(causal_product=1.6) | {"causal_product": {"flags": ["-O2"]}}, 0, "its flags are unknown"),
    ],
)  # fmt: skip
def test_a_row_says_what_was_measured(record: dict[str, Any], number: int, text: str) -> None:
    assert text in " | ".join(evaluate_one(record)[number])


def test_without_native_kernels_the_reason_is_given() -> None:
    record = cpu_record()
    for entry in record["rows"]:
        if entry["implementation"] == "native":
            entry |= {"status": "unavailable", "message": "not built"}
    assert {verdict.verdict for verdict in evaluate_one(record)} == {"unmeasured: native: not built"}


def test_all_targets_are_listed_whatever_was_measured() -> None:
    table = render(evaluate([])).splitlines()
    assert len(table) == 2 + 17 and all("unmeasured: " in line for line in table[2:])
    assert "unmeasured: kernels.py was not run on a GPU" in table[-2] and render([]) == ""
    verdicts = evaluate([generation_record(0.0), cpu_record()])
    assert [verdict.verdict for verdict in verdicts].count("met") == 8 and len(verdicts) == 17
