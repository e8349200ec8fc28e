"""The programs run, on tiny cases, leave results that can be read, and refuse what makes no sense."""

import itertools
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import all_cpu
import kernels
import pytest
import torch
from harness.cases import RULES

from tests.benchmarks.conftest import BENCHMARKS, Run

MEASURING = ("kernels", "generation", "translation", "training")
BOTH = ("forward", "forward+backward")


@pytest.mark.slow
def test_all_results_of_a_cpu_are_made_by_one_command(tmp_path: Path, monkeypatch, run: Run) -> None:
    monkeypatch.setattr("kernels.keep_freed_memory", lambda: True)  # of this process it is not to be kept
    monkeypatch.setattr(all_cpu, "run", lambda name, *arguments: run(name.removesuffix(".py"), *arguments))
    page = tmp_path / "page.md"
    assert run("all_cpu", "--quick", "--threads", 1, "--results", tmp_path, "--page", page) == ""
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == {"kernels_cpu", "next_token", "training_length", "translation"}
    for name, record in found.items():
        assert record["device"] == "cpu" and record["threads"] == 1 and record["cut"] == []
        assert record["machine"]["cpu"] and record["versions"]["torch"] == torch.__version__
        assert f"]({name}.json)" in page.read_text()

    def columns(name: str, *keys: str) -> set[tuple[Any, ...]]:
        return {tuple(row.get(key) for key in keys) for row in found[name]["rows"]}

    ours = itertools.product((*BOTH, "step"), ["chunkwise"], RULES)
    others = [*itertools.product(["step"], ["reference"], RULES), *itertools.product(BOTH, ["SDPA"], ["softmax"])]
    measured = columns("kernels_cpu", "dtype", "status", "pass", "implementation", "rule")
    dtypes = ("float32", "bfloat16", "float16")
    assert {(dtype, "measured", *who) for who in (*ours, *others) for dtype in dtypes} <= measured
    for row in found["kernels_cpu"]["rows"]:
        if row["status"] == "measured":
            seconds = row["seconds"]
            assert 0 < seconds["min"] <= seconds["lower"] <= seconds["median"] <= seconds["upper"]
            assert row["limit"]["seconds"] > 0
        else:
            assert row["status"] == "unavailable" and row["message"]
    models = ("transformer", "elu", "dpfp-2", "favor-128")
    tokens = set(itertools.product(("transformer", "delta", "decay", "sum"), (16, 32)))
    assert columns("next_token", "model", "length") == tokens
    assert columns("translation", "model", "beam", "source", "length") == {
        (model, beam, *case) for model in models for beam in (1, 4) for case in ((4, 4), (4, 8), (8, 8))
    }
    assert [row["model"] for row in found["translation"]["whole"]] == list(models)
    for name in ("next_token.png", "training_length.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and f"]({name})" in page.read_text()


def test_on_a_gpu_the_rules_are_measured_in_three_dtypes_and_what_targets_speak_of_comes_first() -> None:
    options = Namespace(device="cuda", quick=False, shapes=("lm-small", "step-8"))
    cases = [(case.shape.name, case.shape.batch, case.dtype, case.kind) for case in kernels.cases_of(options)]
    dtypes = ("bfloat16", "float32", "float16")
    assert cases == [
        *(("lm-small", 96, dtype, "forward+backward") for dtype in dtypes),
        *(("step-8", 8, dtype, "step") for dtype in dtypes),
        *(("lm-small", 96, dtype, "forward") for dtype in dtypes),
    ]
    options.device = "cpu"
    cases = [(case.shape.batch, case.dtype) for case in kernels.cases_of(options)]
    assert cases == [*[(48, "float32")] * 2, (8, "float32"), *[(48, "bfloat16")] * 2]


RULES_OF_DELTA, INSTALLED = ("gated delta", "delta", "Kimi delta", "transformers"), ("installed", "transformers")
# By subject each part's passes and contestants.
IN_TURNS = {
    "mixers": {
        "scan": (BOTH, ("native", "chunkwise", "transformers")),
        "layer": (BOTH, ("Mamba", "transformers")),
        "attention": (BOTH, ("softmax", "local", "abc")),
    },
    "gated_delta": dict.fromkeys(("heads of 128", "heads of 64"), ((*BOTH, "steps"), RULES_OF_DELTA)),
    "models": dict.fromkeys(("Qwen3-Next", "Kimi-Linear"), (("prefill", "token"), INSTALLED)),
}


@pytest.mark.slow
@pytest.mark.parametrize("subject", IN_TURNS)
def test_peers_of_transformers_take_turns(subject: str, tmp_path: Path, monkeypatch, run: Run) -> None:
    pytest.importorskip("transformers")
    program = "against_transformers"
    monkeypatch.setattr(f"{program}.keep_freed_memory", lambda: True)  # of this process it is not to be kept
    assert run(program, subject, "--quick", "--threads", 1, "--out", tmp_path / "out.json") == ""
    record = json.loads((tmp_path / "out.json").read_text())
    expected = [x for part, lists in IN_TURNS[subject].items() for x in itertools.product([part], *lists)]
    assert [(row["part"], row["pass"], row["name"]) for row in record["rows"]] == expected
    assert all(row["ratio"] > 0 and row["seconds"]["rounds"] == 2 for row in record["rows"])
    assert record["program"] == subject


@pytest.mark.parametrize("quick", [True, False])
def test_tiny_cases_never_replace_what_was_measured(quick: bool, monkeypatch, run: Run) -> None:
    places: list[Path] = []

    def note(name: str, *arguments: str) -> None:
        given = itertools.pairwise(arguments)
        places.extend(Path(x) for key, x in given if key in ("--out", "--figure", "--results", "--page"))

    monkeypatch.setattr(all_cpu, "run", note)
    run("all_cpu", *(["--quick"] if quick else []))
    assert len(places) == 8 and {BENCHMARKS.parent in path.parents for path in places} == {not quick}


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (
            [
                *[(name, "--rounds") for name in (*MEASURING, "sliding_window")],
                *[("kernels", "--threads"), ("all_cpu", "--threads"), ("sliding_window", "--tokens")],
            ],
            ["0", "-1", "1.5", "many"],
            "argument {option}: {value} is not a positive whole number",
        ),
        (
            [(name, "--budget") for name in (*MEASURING, "all_cpu")],
            ["0", "-1", "nan", "inf", "long"],
            "argument {option}: {value} is not a positive number of seconds",
        ),
        ([("kernels", "--rules"), ("kernels", "--shapes")], ["tiny"], "argument {option}: invalid choice: 'tiny'"),
        ([("kernels", "--figure")], ["a.png"], "--lengths is missing"),
        ([("kernels", "--device"), ("generation", "--device")], ["cuda"], "torch sees no GPU"),
    ],
)
def test_what_makes_no_sense_is_refused(options, values: list[str], message: str, monkeypatch, run: Run) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for (name, option), value in itertools.product(options, values):
        assert message.format(option=option, value=value) in run(name, option, value), name
