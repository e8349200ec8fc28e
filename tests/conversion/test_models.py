"""A converted model gives the original logits and probabilities; the conversion back gives the original bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fairseq_fastweights.files.digests import is_changed
from tests.conversion import sources

LOGITS = 1e-4  # of a few units; those seen are below 2e-6


def without_prefix(folder: Path) -> None:
    """As GPT-2 was published: by the model below the language model, and without `tie_word_embeddings`."""
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del state["lm_head.weight"]
    sources.save_bin(folder, {name.removeprefix("transformer."): weight for name, weight in state.items()})
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))


def as_older(folder: Path) -> None:
    """The rotary embedding as older files have it."""
    sources.set_config(folder, rope_parameters=None, **TANH)


class Case(NamedTuple):
    neox: bool
    settings: dict[str, Any] = {}
    form: dict[str, Any] = {}
    dtype: torch.dtype = torch.float32
    change: Callable[[Path], None] = lambda folder: None


ODD = {"n_embd": 13, "n_head": 1, "n_inner": 7, "n_layer": 3, "activation_function": "gelu"}
THREE_HEADS = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 11}
TANH = {"rotary_pct": 0.5, "rotary_emb_base": 77, "hidden_act": "gelu_new"}
CASES = {
    "gpt2": Case(False),
    "gpt2, one head, odd sizes, untied, exact gelu": Case(False, {**ODD, "tie_word_embeddings": False}),
    "gpt2, relu, shards of bin": Case(False, {"activation_function": "relu"}, {"in_bin": True, "shards": 3}),
    "gpt2, shards, two files of tokenizer": Case(False, form={"shards": 4, "two_files": True}),
    "gpt2, bfloat16 bin": Case(False, {}, {"in_bin": True}, torch.bfloat16),
    "gpt2, without prefix": Case(False, form={"in_bin": True}, change=without_prefix),
    "neox, all of a head": Case(True, {"rotary_pct": 1.0}),
    "neox, another base, tanh": Case(True, TANH),
    "neox, another base, tanh, older": Case(True, TANH, change=as_older),
    "neox, one after the other": Case(True, {"use_parallel_residual": False}),
    "neox, three heads, shards": Case(True, THREE_HEADS, {"shards": 5}),
    "neox, tied bin": Case(True, {"tie_word_embeddings": True}, {"in_bin": True}),
    "neox, nothing filled up, float16": Case(True, {"vocab_size": 272}, dtype=torch.float16),
}
QUICK = ("gpt2", "neox, one after the other")


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
@torch.no_grad()
def test_a_converted_model_is_its_source_and_gives_its_bits_back(case, tmp_path):
    neox, settings, form, dtype, change = CASES[case]
    source = sources.model(neox, **settings).to(dtype)
    theirs = sources.save(tmp_path / "theirs", source, **form)
    change(theirs)
    found = sources.check_round_trip(theirs, source, lambda tokens: source.float()(tokens).logits, LOGITS)
    # The checkpoint is as fairseq writes it before the first update.
    state = torch.load(tmp_path / "ours" / "model.pt", weights_only=True)
    assert {n: w.shape for n, w in state["model"].items()} == {
        n: w.shape for n, w in found["model"].state_dict().items()
    }
    assert state["model"]["decoder.version"] == 3 and state["optimizer_history"][-1]["num_updates"] == 0
    assert is_changed(state) is False and b'"digest":"' in (tmp_path / "back" / "model.safetensors").read_bytes()
    for path in theirs.iterdir():
        if path.suffix == ".txt" or (path.suffix == ".json" and "index" not in path.name):
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
