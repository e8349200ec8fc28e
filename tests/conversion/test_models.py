"""A converted model is its source: logits and probabilities; what is converted back is its source's bits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_fastweights.conversion.huggingface import from_huggingface, to_huggingface
from fairseq_fastweights.conversion.weight_files import WeightFiles
from tests.conversion import sources

# Of logits of a few units; what is seen is below 2e-6.
LOGITS = 1e-4


@dataclass(frozen=True)
class Case:
    neox: bool
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    form: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: torch.dtype = torch.float32


BIN = {"form": "bin"}
CASES = {
    "gpt2": Case(False),
    "gpt2, one head, odd sizes, untied, exact gelu": Case(
        False,
        {"n_embd": 13, "n_head": 1, "n_inner": 7, "n_layer": 3, "tie_word_embeddings": False}
        | {"activation_function": "gelu"},
    ),
    "gpt2, relu, shards of bin": Case(False, {"activation_function": "relu"}, {**BIN, "shards": 3}),
    "gpt2, shards, two files of tokenizer": Case(False, form={"shards": 4, "two_files": True}),
    "gpt2, bfloat16 bin": Case(False, form=BIN, dtype=torch.bfloat16),
    "neox, all of a head": Case(True, {"rotary_pct": 1.0}),
    "neox, another base, tanh": Case(True, {"rotary_pct": 0.5, "rotary_emb_base": 77, "hidden_act": "gelu_new"}),
    "neox, one after the other": Case(True, {"use_parallel_residual": False}),
    "neox, three heads, shards": Case(
        True, {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 11}, {"shards": 5}
    ),
    "neox, tied bin": Case(True, {"tie_word_embeddings": True}, BIN),
    "neox, nothing filled up, float16": Case(True, {"vocab_size": 272}, dtype=torch.float16),
}


QUICK = ("gpt2", "neox, one after the other")


@pytest.fixture(scope="module", params=[pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def converted(request, tmp_path_factory) -> tuple[torch.nn.Module, Path, Path]:
    """The source, its folder, and what was made of it."""
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("source")
    source = sources.model(case.neox, **case.settings).to(case.dtype)
    sources.save(folder / "theirs", source, **case.form)
    from_huggingface(folder / "theirs", folder / "ours")
    return source, folder / "theirs", folder / "ours"


def in_fairseq(source, folder):
    model, task = sources.load(folder)
    numbers = sources.Numbers(task.dictionary, source.config.vocab_size, source.config.eos_token_id)
    return model, task, numbers


@torch.no_grad()
def test_logits_and_probabilities_are_the_sources(converted):
    source, _, folder = converted
    model, task, numbers = in_fairseq(source, folder)
    source = source.float()
    tokens = sources.random_tokens(source)
    expected = source(tokens).logits
    out = model(numbers.translate(tokens))
    assert expected.std() > 0.5  # so that the bound says something
    assert (numbers.logits(out[0]) - expected).abs().max() <= LOGITS
    log_probabilities = model.get_normalized_probs(out, log_probs=True)
    assert (numbers.logits(log_probabilities) - expected.log_softmax(-1)).abs().max() <= LOGITS
    special = [task.dictionary.bos(), task.dictionary.pad(), task.dictionary.unk()]
    assert not model.get_normalized_probs(out, log_probs=False)[..., special].any()


@torch.no_grad()
def test_step_by_step_it_is_the_same(converted):
    source, _, folder = converted
    model, _, numbers = in_fairseq(source, folder)
    tokens = numbers.translate(sources.random_tokens(source, time=10))
    full = model(tokens)[0]
    state: dict = {}
    steps = [model(tokens[:, :t], incremental_state=state)[0] for t in range(1, 11)]
    assert (torch.cat(steps, dim=1) - full).abs().max() <= LOGITS


def test_a_round_trip_gives_the_sources_bits_back(converted, tmp_path):
    _source, theirs, folder = converted
    to_huggingface(folder, tmp_path / "back")
    ignored = (".attn.bias", ".masked_bias", ".attention.bias", ".inv_freq")
    files, back = WeightFiles(theirs), WeightFiles(tmp_path / "back")
    names = {name for name in files.shapes if not name.endswith(ignored)}
    assert set(back.shapes) == names
    for name in names:
        before, after = files.read(name), back.read(name)
        assert before.dtype == after.dtype and torch.equal(before, after), name
    for path in theirs.iterdir():
        if path.suffix == ".txt" or (path.suffix == ".json" and "index" not in path.name):
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_weights_in_a_file_without_prefix(tmp_path):
    """As GPT-2's were published: by the model below the language model."""
    source = sources.model(False)
    folder = sources.save(tmp_path / "theirs", source)
    (folder / "model.safetensors").unlink()
    state = {n.removeprefix("transformer."): w for n, w in source.state_dict().items() if n != "lm_head.weight"}
    sources.save_bin(folder, state)
    from_huggingface(folder, tmp_path / "ours")
    model, _, numbers = in_fairseq(source, tmp_path / "ours")
    tokens = sources.random_tokens(source)
    with torch.no_grad():
        out = numbers.logits(model(numbers.translate(tokens))[0])
        assert (out - source(tokens).logits).abs().max() <= LOGITS
    to_huggingface(tmp_path / "ours", tmp_path / "back")
    back = WeightFiles(tmp_path / "back")
    assert set(back.shapes) == set(state) and all(torch.equal(back.read(n), state[n]) for n in state)


@pytest.mark.slow
def test_older_and_newer_ways_to_write_the_rotary_embedding(tmp_path):
    source = sources.model(True, rotary_pct=0.5, rotary_emb_base=500)
    folder = sources.save(tmp_path / "new", source)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("rope_parameters")["partial_rotary_factor"] == 0.5
    (folder / "config.json").write_text(json.dumps(config | {"rotary_pct": 0.5, "rotary_emb_base": 500}))
    from_huggingface(folder, tmp_path / "ours")
    model, _, numbers = in_fairseq(source, tmp_path / "ours")
    tokens = sources.random_tokens(source)
    with torch.no_grad():
        out = numbers.logits(model(numbers.translate(tokens))[0])
        assert (out - source(tokens).logits).abs().max() <= LOGITS


def test_the_checkpoint_is_as_fairseq_writes_it_before_the_first_update(converted):
    _, _, folder = converted
    model, _ = sources.load(folder)
    state = torch.load(folder / "model.pt", weights_only=True)
    assert {n: w.shape for n, w in state["model"].items()} == {n: w.shape for n, w in model.state_dict().items()}
    assert state["model"]["decoder.version"] == 3
    assert state["optimizer_history"][-1]["num_updates"] == 0
