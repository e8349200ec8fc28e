"""A generated token is measured as generation makes it, from the state that it would have left."""

from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from typing import Any

import generation
import pytest
import torch
import translation
from generation import TRANSFORMER, Generation
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.slow

SETTINGS = generation.QUICK_SETTINGS
ROWS = SETTINGS["batch"]
build = cache(partial(generation.build, settings=SETTINGS, backend="chunkwise", longest=40))


def shapes(state: dict[str, Any]) -> list[tuple[str, str, torch.Size]]:
    return sorted((key, n, x.shape) for key, buffer in state.items() for n, x in buffer.items() if x is not None)


@pytest.mark.parametrize("most_read", [3, 20])
@pytest.mark.parametrize("name", [TRANSFORMER, *generation.RULES])
def test_a_generation_comes_to_a_length_with_the_state_of_generation(name: str, most_read: int) -> None:
    model, tokens = build(name), torch.randint(4, SETTINGS["words"], (ROWS, 20))
    state: dict[str, Any] = {}
    generated = {0: shapes(state)}
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
def test_a_translated_token_is_made_as_the_generator_makes_it(name: str, beam: int) -> None:
    rows, source, length = translation.QUICK_SETTINGS["hypotheses"], torch.tensor([4, 9, 7]), 5
    model, dictionary = translation.build(name, settings=translation.QUICK_SETTINGS, longest=8)
    generator = translation.build_generator(deepcopy(model), dictionary, beam, length=length + 1)
    hypotheses = translation.hypotheses_after(generator, name, source, length, rows)
    calls: list[tuple[str, Any]] = []  # of the models and of the search, with the shapes of their first arguments

    def noting(called: str, call: Any, *given: Any) -> Any:
        noted = tree_map(lambda x: x.shape if isinstance(x, torch.Tensor) else x, given[: CALLS[called]])
        calls.append((called, noted))
        return call(*given)

    for called in CALLS:
        owner = generator.search if called == "step" else generator.model
        setattr(owner, called, partial(noting, called, getattr(owner, called)))
    translation.advance(generator, hypotheses)
    measured = list(calls)
    calls.clear()
    [best, *_], *_ = generator.generate([], translation.sample(source, rows // beam))
    assert len(best["tokens"]) == length + 2  # as many as were asked for, and the symbol that ends them
    # A row for each hypothesis is made of the encoder's output first, and no order is asked for at the first token.
    steps = [calls[:3], *(calls[i : i + 4] for i in range(3, len(calls), 4))]
    assert [len(step) for step in steps] == [3] + [4] * (length + 1) and measured == steps[length]


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
            assert attention["keys"].shape[2] == length + 2
            assert memory["read"].tolist() == made.cache.read.tolist() == [length + 2] * 2
            assert memory["state"].any()  # words have left its window
        elif step is source:
            assert made.cache.get_seq_length() == length + 2
    torch.testing.assert_close(logits[2], logits[1])
