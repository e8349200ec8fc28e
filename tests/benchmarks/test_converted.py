"""benchmarks/harness/converted.py: a converted model, whose steps are timed."""

from importlib import import_module

import pytest
import torch

pytestmark = pytest.mark.slow


def test_a_converted_model_goes_on_after_a_context() -> None:
    pytest.importorskip("transformers")
    converted = import_module("harness.converted")
    source = converted.llama(converted.TINY | {"num_hidden_layers": 2})
    hybrid = converted.converted(source, "window-sum", "2")
    ours, theirs = hybrid.model.layers[0].fc2, source.model.layers[0].mlp.down_proj
    assert ours.weight.data_ptr() == theirs.weight.data_ptr()  # it is not there twice
    logits = []
    for step in (source, hybrid, converted.compiled(hybrid, backend="eager")):
        torch.manual_seed(0)
        generation = converted.Generation(step, batch=2, length=70)
        logits.append([generation.advance() for _ in range(2)][-1])
        if step is hybrid:
            attention, memory = (layer.state for layer in generation.cache.layers)
            assert attention["keys"].shape[2] == 72
            assert memory["read"].tolist() == generation.cache.read.tolist() == [72] * 2
            assert memory["state"].any()  # words have left its window
        elif step is source:
            assert generation.cache.get_seq_length() == 72
    torch.testing.assert_close(logits[2], logits[1])
