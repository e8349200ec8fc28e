"""A step of generation is one graph for torch.compile and for torch.export."""

from __future__ import annotations

import copy

import pytest
import torch

from fairseq_fastweights.huggingface import GenerationStep
from fairseq_fastweights.mixers.registry import MIXERS
from tests.huggingface.test_generation import ROUNDING, build, draw

# All in one model, a layer each: a graph for each mixer would take a minute.
BOUNDED = [name for name in MIXERS if name not in ("softmax", "linformer")]


@pytest.fixture(autouse=True)
def forget():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.no_grad()
def test_a_step_is_one_graph():
    mixers = [*BOUNDED, "softmax"]
    model, tokens = build(mixers, num_hidden_layers=len(mixers)), draw(2, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected, out = model(tokens[:, :5]), model(tokens[:, :5])
    for time in range(5, 8):
        assert (out.logits - expected.logits).abs().max() <= ROUNDING
        token = tokens[:, time : time + 1]
        expected, out = (
            call(token, past_key_values=x.past_key_values) for call, x in ((model, expected), (compiled, out))
        )


@torch.no_grad()
def test_an_exported_step_serves_all_steps():
    model, tokens = build(BOUNDED, num_hidden_layers=len(BOUNDED)).requires_grad_(False), draw(2, 8)
    cache = model(tokens[:, :5]).past_key_values
    read, states = copy.deepcopy(GenerationStep.begin(cache))
    step = torch.export.export(GenerationStep(model), (tokens[:, 5:6], read, states)).module()
    for time in range(5, 8):
        token = tokens[:, time : time + 1]
        logits, read, states = step(token, read, states)
        assert (logits - model(token, past_key_values=cache).logits[:, -1]).abs().max() <= ROUNDING
