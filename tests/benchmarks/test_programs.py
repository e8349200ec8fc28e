"""The programs run on tiny cases, leave results that can be read, and measure decode steps as fairseq makes them."""

import itertools
import re
from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import all_cpu
import generation
import pytest
import report
import torch
import translation
from generation import TRANSFORMER, Generation
from harness import records
from torch.utils._pytree import tree_map

FACTS = ("part", "name", "model", "pass", "implementation", "rule")


def implementations(record: dict[str, Any]) -> set[str]:
    """The implementations of a record by part and pass, without sizes."""
    return {re.sub(r"\d+", "N", " ".join(str(row.get(fact)) for fact in FACTS)) for row in record["rows"]}


def committed(name: str) -> set[str]:
    return implementations(records.read(report.RESULTS / f"{name}.json"))


@pytest.mark.slow
def test_all_results_of_a_cpu_are_made_by_one_command(tmp_path: Path, monkeypatch, run) -> None:
    monkeypatch.setattr("kernels.keep_freed_memory", lambda: None)  # this process should not keep it
    page = tmp_path / "page.md"

    def run_quickly(name: str, *arguments: str) -> None:
        more = ("--results", tmp_path, "--page", page) if name == "report.py" else ("--quick",)
        assert run(name.removesuffix(".py"), *arguments, *more) == ""

    monkeypatch.setattr(all_cpu, "run", run_quickly)
    monkeypatch.setattr(all_cpu, "RESULTS", tmp_path)
    assert run("all_cpu", "--threads", 1) == ""
    found = {path.stem: records.read(path) for path in tmp_path.glob("*.json")}
    assert set(found) == {"kernels_cpu", "next_token", "training_length", "translation"}
    for name, record in found.items():
        assert record["threads"] == 1 and record["cut"] == [] and f"]({name}.json)" in page.read_text()
        assert implementations(record) >= committed(name)
        # Nothing failed; compiled kernels are optional.
        lacking = {row["implementation"] for row in record["rows"] if row.get("status", "measured") != "measured"}
        assert lacking <= {"native", "causal_product"}
    for name in ("next_token.png", "training_length.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and f"]({name})" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["mixers", "gated_delta", "models", "converted"])
def test_peers_of_transformers_take_turns(subject: str, tmp_path: Path, monkeypatch, run) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    before = dict(vars(qwen))
    monkeypatch.setattr("against_transformers.keep_freed_memory", lambda: None)  # this process should not keep it
    assert run("against_transformers", subject, "--quick", "--threads", 1, "--out", tmp_path / "out.json") == ""
    record = records.read(tmp_path / "out.json")
    assert implementations(record) >= committed(subject)
    assert all(row["ratio"] > 0 and row["seconds"]["rounds"] == 2 for row in record["rows"])
    assert dict(vars(qwen)) == before, "functions of transformers were left replaced"


REFUSED = """
generation --batch; training --rounds; sliding_window --rounds; all_cpu --threads: 0 1.5 many: positive whole number
all_cpu --budget: 0 -1 nan inf long: is not a positive number of seconds
kernels --rules; kernels --shapes; updates --models: tiny: invalid choice: 'tiny'
kernels --figure: a.png: --lengths is missing
kernels --device; against_transformers converted --quick --device: cuda: torch sees no GPU
against_transformers mixers --compiled: source: --compiled is given; the subject must be converted, not mixers
against_transformers converted --compiled: transformers: it must have some of 'source'
"""


@pytest.mark.parametrize("line", REFUSED.strip().split("\n"))
def test_invalid_options_are_refused(line: str, monkeypatch, run) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls, values, message = line.split(": ", 2)
    if "against_transformers" in calls:
        pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        monkeypatch.setattr("against_transformers.keep_freed_memory", lambda: None)
    for call, value in itertools.product(calls.split("; "), values.split()):
        said = run(*call.split(), value)
        assert message in said and call.split()[-1] in said, call


SETTINGS = generation.QUICK_SETTINGS
ROWS = SETTINGS["batch"]
build = cache(partial(generation.build, settings=SETTINGS, backend="chunkwise", longest=40))


def shapes(state: dict[str, Any]) -> list[tuple[str, str, torch.Size]]:
    return sorted((key, n, x.shape) for key, buffer in state.items() for n, x in buffer.items() if x is not None)


@pytest.mark.parametrize("most_read", [3, 20])
@pytest.mark.parametrize("name", [TRANSFORMER, *generation.RULES])
def test_a_generation_reaches_a_length_with_the_state_of_decoding(name: str, most_read: int) -> None:
    model, tokens = build(name), torch.randint(4, SETTINGS["words"], (ROWS, 20))
    state, generated = {}, {}
    with torch.no_grad():
        for end in range(1, 15):
            model(tokens[:, :end], incremental_state=state)
            generated[end] = shapes(state)
    rolling = Generation(model, tokens).go_on(name, 2)
    assert shapes(rolling.state) == generated[2]
    rolling.go_on(name, 12, most_read)
    assert rolling.length == 12 and shapes(rolling.state) == generated[12]
    for end in (13, 14):  # and it goes on as generation does
        assert rolling.advance().shape == (ROWS, 1, len(model.decoder.dictionary))
        assert rolling.length == end and shapes(rolling.state) == generated[end]
    sizes = generation.memory(model, name, tokens, 12, "cpu")
    assert sizes["state bytes"] == sum(4 * x.numel() for *_, x in generated[12]) < sizes["peak bytes"]


CALLS = {"reorder_incremental_state": 2, "reorder_encoder_out": 2, "forward_decoder": 3, "step": 3}


@pytest.mark.parametrize("beam", translation.BEAMS)
@pytest.mark.parametrize("name", [translation.TRANSFORMER, *translation.MAPS])
def test_a_decode_step_of_translation_is_the_generators(name: str, beam: int) -> None:
    rows, source, length = translation.QUICK_SETTINGS["hypotheses"], torch.tensor([4, 9, 7]), 5
    model, dictionary = translation.build(name, settings=translation.QUICK_SETTINGS, longest=8)
    generator = translation.build_generator(deepcopy(model), dictionary, beam, length=length + 1)
    hypotheses = translation.hypotheses_after(generator, name, source, length, rows)
    calls: list[tuple[str, Any]] = []  # of the models and of the search, with the shapes of their first arguments

    def noting(called: str, call: Any, *given: Any) -> Any:
        calls.append((called, tree_map(lambda x: getattr(x, "shape", x), given[: CALLS[called]])))
        return call(*given)

    for called in CALLS:
        owner = generator.search if called == "step" else generator.model
        setattr(owner, called, partial(noting, called, getattr(owner, called)))
    translation.advance(generator, hypotheses)
    [best, *_], *_ = generator.generate([], translation.sample(source, rows // beam))
    assert len(best["tokens"]) == length + 2  # as many as were asked for, and the symbol that ends them
    measured, first, *others = calls[:4], calls[4:7], *(calls[i : i + 4] for i in range(7, len(calls), 4))
    # A row for each hypothesis is made of the encoder's output first, and no order is asked for at the first token.
    assert len(first) == 3 and [len(step) for step in others] == [4] * (length + 1)
    assert measured == others[length - 1]


@pytest.mark.slow
def test_a_converted_model_goes_on_after_a_context() -> None:
    pytest.importorskip("transformers")
    converted = import_module("harness.converted")
    source = converted.llama(converted.TINY | {"num_hidden_layers": 2})
    hybrid = converted.converted(source, "window-sum", "2")
    ours, theirs = hybrid.model.layers[0].fc2, source.model.layers[0].mlp.down_proj
    assert ours.weight.data_ptr() == theirs.weight.data_ptr()  # it is not there twice
    logits, length = [], 70
    for step in (source, hybrid, converted.compiled(hybrid, backend="eager")):
        torch.manual_seed(0)
        made = converted.Generation(step, batch=2, length=length)
        logits.append([made.advance() for _ in range(2)][-1])
        if step is hybrid:
            attention, memory = (layer.state for layer in made.cache.layers)
            assert attention["keys"].shape[2] == length + 2 and memory["state"].any()  # words have left its window
            assert memory["read"].tolist() == made.cache.read.tolist() == [length + 2] * 2
        elif step is source:
            assert made.cache.get_seq_length() == length + 2
    torch.testing.assert_close(logits[2], logits[1])
