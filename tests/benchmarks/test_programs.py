"""The programs run, on tiny cases, leave results that can be read, and refuse what makes no sense."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import all_cpu
import pytest
import report
import torch
from harness import pages
from harness.updates import Update

FACTS = ("part", "name", "model", "pass", "implementation", "rule")


def contestants(record: dict[str, Any]) -> set[str]:
    """Who takes part in a record, and in what of it, whatever the sizes."""
    return {re.sub(r"\d+", "N", " ".join(str(row.get(fact)) for fact in FACTS)) for row in record["rows"]}


def committed(name: str) -> set[str]:
    return contestants(json.loads((report.RESULTS / f"{name}.json").read_text()))


@pytest.mark.slow
def test_all_results_of_a_cpu_are_made_by_one_command(tmp_path: Path, monkeypatch, run) -> None:
    monkeypatch.setattr("kernels.keep_freed_memory", lambda: None)  # of this process it is not to be kept
    page = tmp_path / "page.md"

    def run_quickly(name: str, *arguments: str) -> None:
        more = ("--results", tmp_path, "--page", page) if name == "report.py" else ("--quick",)
        assert run(name.removesuffix(".py"), *arguments, *more) == ""

    monkeypatch.setattr(all_cpu, "run", run_quickly)
    monkeypatch.setattr(all_cpu, "RESULTS", tmp_path)
    assert run("all_cpu", "--threads", 1) == ""
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == {"kernels_cpu", "next_token", "training_length", "translation"}
    for name, record in found.items():
        assert record["threads"] == 1 and record["cut"] == [] and f"]({name}.json)" in page.read_text()
        assert contestants(record) >= committed(name)
        # Nobody failed; what is compiled need not be there.
        lacking = {row["implementation"] for row in record["rows"] if row.get("status", "measured") != "measured"}
        assert lacking <= {"native", "causal_product"}
    for name in ("next_token.png", "training_length.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and f"]({name})" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["mixers", "gated_delta", "models", "converted"])
def test_peers_of_transformers_take_turns(subject: str, tmp_path: Path, monkeypatch, run) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    before = dict(vars(qwen))
    monkeypatch.setattr("against_transformers.keep_freed_memory", lambda: None)  # of this process it is not to be kept
    assert run("against_transformers", subject, "--quick", "--threads", 1, "--out", tmp_path / "out.json") == ""
    record = json.loads((tmp_path / "out.json").read_text())
    assert contestants(record) >= committed(subject)
    assert all(row["ratio"] > 0 and row["seconds"]["rounds"] == 2 for row in record["rows"])
    assert dict(vars(qwen)) == before, "functions of transformers were left replaced"


PEERS = "against_transformers --quick"
ROUNDS = [("generation", "--batch"), *((name, "--rounds") for name in ("kernels", "training", "sliding_window"))]


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        ([*ROUNDS, ("all_cpu", "--threads")], "0 -1 1.5 many", "argument {}: {} is not a positive whole number"),
        ([("all_cpu", "--budget")], "0 -1 nan inf long", "argument {}: {} is not a positive number of seconds"),
        ([("kernels", "--rules"), ("kernels", "--shapes")], "tiny", "argument {}: invalid choice: 'tiny'"),
        ([("kernels", "--figure")], "a.png", "--lengths is missing"),
        ([("kernels", "--device")], "cuda", "torch sees no GPU"),
        ([(f"{PEERS} mixers", "--compiled")], "source", "{} is given; the subject must be converted, not mixers"),
        ([(f"{PEERS} converted", "--device")], "cuda", "{} is {}, and torch sees no GPU"),
        ([(f"{PEERS} converted", "--compiled")], "transformers", "{} has '{}'; it must have some of 'source', "),
    ],
)
def test_what_makes_no_sense_is_refused(options, values: str, message: str, monkeypatch, run) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if options[0][0].startswith(PEERS):
        pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        monkeypatch.setattr("against_transformers.keep_freed_memory", lambda: None)
    for (words, option), value in itertools.product(options, values.split()):
        assert message.format(option, value) in run(*words.split(), option, value), words


def test_what_was_counted_is_recorded_and_shown(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Update(
        {"forward": Counter(mm=3, graph_0_cpp_fused_add_0=1), "optimizer": Counter(_fused_adamw_=1)},
        ["cpu at trainer.py:1"],
    )
    monkeypatch.setattr("updates.watch", lambda data, model, precision, way: known)
    monkeypatch.setattr("training.prepare", lambda folder, settings: folder)
    options = "--models delta --precisions bf16 --ways compile --out".split()
    assert run("updates", *options, tmp_path / "out.json") == ""
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["rows"][0]["most"] == {"mm": 3, "graph_0_cpp_fused_add_0": 1, "_fused_adamw_": 1}
    cells = [cell.strip() for cell in pages.render(record).splitlines()[2].split("|")[1:-1]]
    assert cells == ["delta", "bf16", "compiled", "5", "1", "4", "0", "1", "1"]
