"""The measured translated token starts from the state, and does the work, of fairseq's generator."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
import translation
from fairseq.sequence_generator import SequenceGenerator
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.slow
SETTINGS = translation.QUICK_SETTINGS
ROWS = SETTINGS["hypotheses"]
SOURCE = torch.tensor([4, 9, 7])
LENGTH = 5
NAMES = (translation.TRANSFORMER, *translation.MAPS)
built = cache(partial(translation.build, settings=SETTINGS, longest=8))


def begin(name: str, beam: int) -> tuple[SequenceGenerator, translation.Hypotheses]:
    model, dictionary = built(name)
    generator = translation.build_generator(deepcopy(model), dictionary, beam, length=LENGTH + 1)
    return generator, translation.hypotheses_after(generator, name, SOURCE, LENGTH, ROWS)


def note_calls(generator: SequenceGenerator) -> list[tuple[str, Any]]:
    """The calls of the models and of the search from now on, with the shapes of what they are given."""
    calls: list[tuple[str, Any]] = []

    def shape(x: Any) -> Any:
        return tuple(x.shape) if isinstance(x, torch.Tensor) else x

    def noting(name: str, call: Callable[..., Any], arguments: int) -> Callable[..., Any]:
        return lambda *given: calls.append((name, tree_map(shape, given[:arguments]))) or call(*given)

    arguments = {"reorder_incremental_state": 2, "reorder_encoder_out": 2, "forward_decoder": 3, "step": 3}
    for name, number in arguments.items():
        owner = generator.search if name == "step" else generator.model
        setattr(owner, name, noting(name, getattr(owner, name), number))
    return calls


@pytest.mark.parametrize("beam", translation.BEAMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_made_as_the_generator_makes_it(name: str, beam: int) -> None:
    generator, hypotheses = begin(name, beam)
    calls = note_calls(generator)
    translation.advance(generator, hypotheses)
    measured = list(calls)
    calls.clear()
    [best, *_], *_ = generator.generate([], translation.sample(SOURCE, ROWS // beam))
    assert len(best["tokens"]) == LENGTH + 2  # as many as were asked for, and the symbol that ends them
    # A row for each hypothesis is made of the encoder's output first, and no order is asked for at the first token.
    steps = [calls[:3], *(calls[i : i + 4] for i in range(3, len(calls), 4))]
    assert [len(step) for step in steps] == [3] + [4] * (LENGTH + 1)
    assert measured == steps[LENGTH]
