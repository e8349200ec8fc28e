"""A generated token is measured as generation makes it, from the state that it would have left."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from typing import Any

import generation
import pytest
import torch
import translation
from fairseq.sequence_generator import SequenceGenerator
from generation import TRANSFORMER, Generation
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.slow

SETTINGS = generation.QUICK_SETTINGS
ROWS = SETTINGS["batch"]
build = cache(partial(generation.build, settings=SETTINGS, backend="chunkwise", longest=40))


def draw_tokens(length: int) -> torch.Tensor:
    return torch.randint(4, SETTINGS["words"], (ROWS, length))


def shapes(state: dict[str, Any]) -> list[tuple[str, str, torch.Size]]:
    return sorted((key, n, x.shape) for key, buffer in state.items() for n, x in buffer.items() if x is not None)


@pytest.mark.parametrize("most_read", [3, 20])
@pytest.mark.parametrize("name", [TRANSFORMER, *generation.RULES])
def test_a_generation_comes_to_a_length_with_the_state_of_generation(name: str, most_read: int) -> None:
    model, tokens = build(name), draw_tokens(20)
    generated: dict[int, Any] = {0: {}}
    with torch.no_grad():
        for end in range(1, 15):
            model(tokens[:, :end], incremental_state=generated[0])
            generated[end] = shapes(generated[0])
    rolling = Generation(model, tokens).go_on(name, 2)
    assert shapes(rolling.state) == generated[2]
    rolling.go_on(name, 12, most_read)
    assert rolling.length == 12 and shapes(rolling.state) == generated[12]
    for end in (13, 14):  # and it goes on as generation does
        assert rolling.advance().shape == (ROWS, 1, len(model.decoder.dictionary))
        assert rolling.length == end and shapes(rolling.state) == generated[end]


def test_sizes_are_those_at_the_length_with_one_layers_cache_twice() -> None:
    model = generation.build(TRANSFORMER, SETTINGS | {"layers": 5}, "chunkwise", longest=501)
    sizes = generation.memory(model, TRANSFORMER, draw_tokens(501), 500, "cpu")
    size = 2 * 5 * ROWS * SETTINGS["width"] * 500 * 4
    assert sizes["state bytes"] == size
    # The cache, a copy of one layer's with the new token in it, and the weights of attention and other small tensors.
    assert 1.2 * size < sizes["peak bytes"] < 1.3 * size


def note_calls(generator: SequenceGenerator) -> list[tuple[str, Any]]:
    """The calls of the models and of the search from now on, with the shapes of what they are given."""
    calls: list[tuple[str, Any]] = []

    def noting(name: str, call: Callable[..., Any], arguments: int) -> Callable[..., Any]:
        def shape(x: Any) -> Any:
            return tuple(x.shape) if isinstance(x, torch.Tensor) else x

        return lambda *given: calls.append((name, tree_map(shape, given[:arguments]))) or call(*given)

    arguments = {"reorder_incremental_state": 2, "reorder_encoder_out": 2, "forward_decoder": 3, "step": 3}
    for name, number in arguments.items():
        owner = generator.search if name == "step" else generator.model
        setattr(owner, name, noting(name, getattr(owner, name), number))
    return calls


@pytest.mark.parametrize("beam", translation.BEAMS)
@pytest.mark.parametrize("name", [translation.TRANSFORMER, *translation.MAPS])
def test_a_translated_token_is_made_as_the_generator_makes_it(name: str, beam: int) -> None:
    rows, source, length = translation.QUICK_SETTINGS["hypotheses"], torch.tensor([4, 9, 7]), 5
    model, dictionary = translation.build(name, settings=translation.QUICK_SETTINGS, longest=8)
    generator = translation.build_generator(deepcopy(model), dictionary, beam, length=length + 1)
    hypotheses = translation.hypotheses_after(generator, name, source, length, rows)
    calls = note_calls(generator)
    translation.advance(generator, hypotheses)
    measured = list(calls)
    calls.clear()
    [best, *_], *_ = generator.generate([], translation.sample(source, rows // beam))
    assert len(best["tokens"]) == length + 2  # as many as were asked for, and the symbol that ends them
    # A row for each hypothesis is made of the encoder's output first, and no order is asked for at the first token.
    steps = [calls[:3], *(calls[i : i + 4] for i in range(3, len(calls), 4))]
    assert [len(step) for step in steps] == [3] + [4] * (length + 1) and measured == steps[length]
