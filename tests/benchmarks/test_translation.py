"""What a translated token is measured from, and what is measured, is what fairseq's generator has and does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import translation
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from harness.translation_tables import render

SETTINGS = translation.QUICK_SETTINGS
ROWS = SETTINGS["hypotheses"]
SOURCE = torch.tensor([4, 9, 7])
LENGTH = 5
NAMES = (translation.TRANSFORMER, *translation.MAPS)


@cache
def built(name: str) -> tuple[Any, Dictionary]:
    return translation.build(name, SETTINGS, longest=8)


def make_generator(name: str, beam: int) -> SequenceGenerator:
    model, dictionary = built(name)
    return translation.build_generator(deepcopy(model), dictionary, beam, length=LENGTH + 1)


def shapes(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: shapes(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [shapes(value) for value in x]
    return tuple(x.shape) if isinstance(x, torch.Tensor) else x


def note_calls(generator: SequenceGenerator) -> list[tuple[str, Any]]:
    """The calls of the models and of the search from now on, with the shapes of what they are given."""
    calls: list[tuple[str, Any]] = []

    def noting(name: str, call: Callable[..., Any], arguments: int) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            calls.append((name, shapes(given[:arguments])))
            return call(*given)

        return noted

    for owner, name, arguments in (
        (generator.model, "reorder_incremental_state", 2),
        (generator.model, "reorder_encoder_out", 2),
        (generator.model, "forward_decoder", 3),
        (generator.search, "step", 3),
    ):
        setattr(owner, name, noting(name, getattr(owner, name), arguments))
    return calls


@pytest.mark.parametrize("beam", translation.BEAMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_made_as_the_generator_makes_it(name: str, beam: int) -> None:
    generator = make_generator(name, beam)
    hypotheses = translation.hypotheses_after(generator, name, SOURCE, LENGTH, ROWS)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_generation_can_be_taken_up_again(name: str) -> None:
    generator = make_generator(name, beam=4)
    hypotheses = translation.hypotheses_after(generator, name, SOURCE, LENGTH, ROWS)
    before = hypotheses.clone()
    results = []
    for _ in range(2):
        step = translation.take_up(generator, hypotheses)
        results.append([step()[0] for _ in range(3)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert shapes(hypotheses.states) == shapes(before.states)


def test_sizes_are_those_of_all_tensors() -> None:
    layers, width, heads = SETTINGS["layers"], SETTINGS["width"], SETTINGS["heads"]
    beam, head, source = 4, width // heads, len(SOURCE)
    # The last layer's output and the embeddings, in float32; which of them are padding; how many there are.
    encoder = ROWS * (2 * source * width * 4 + source + 4)
    sizes = {
        name: translation.hypotheses_after(make_generator(name, beam), name, SOURCE, LENGTH, ROWS).sizes()
        for name in ("transformer", "elu", "dpfp-2")
    }
    # Keys and values of the hypothesis and of its sentence, and which of the latter are padding.
    pairs = ROWS * layers * (2 * (LENGTH + source) * width + source) * 4
    assert sizes["transformer"] == {"state bytes": pairs, "encoder bytes": encoder}
    # A state for each hypothesis, and one for each sentence, with a column for the normaliser.
    states = (ROWS + ROWS // beam) * layers * heads * head * (head + 1) * 4
    numbers = ROWS * 8  # of the sentences that the hypotheses are for
    assert sizes["elu"] == {"state bytes": states, "encoder bytes": encoder + numbers}
    assert sizes["dpfp-2"] == {"state bytes": 4 * states, "encoder bytes": encoder + numbers}


@pytest.mark.parametrize("name", ["transformer", "elu"])
def test_the_peak_holds_the_hypotheses_once(name: str) -> None:
    settings = {**SETTINGS, "layers": 8}
    model, dictionary = translation.build(name, settings, longest=2000)
    generator = translation.build_generator(model, dictionary, 4, length=2000)
    hypotheses = translation.hypotheses_after(generator, name, SOURCE, 1999, ROWS)
    size = sum(hypotheses.sizes().values())
    # One layer's state at a time is there in two orders, and for the Transformer with and without the new token.
    assert size < translation.peak_memory(generator, hypotheses, "cpu") < (1.3 if name == "transformer" else 2) * size


@pytest.mark.parametrize("beam", translation.BEAMS)
def test_hypotheses_change_places_within_their_sentence(beam: int) -> None:
    kept = torch.arange(2 * beam)
    for _ in range(20):
        order = translation.draw_order(2 * beam, beam)
        assert torch.equal(order // beam, kept // beam)
        assert torch.equal(order, kept) == (beam == 1)


def test_tables_show_bytes_of_a_hypothesis_and_times_against_the_transformer() -> None:
    sizes = {"state bytes": 8 << 20, "encoder bytes": 16 << 20, "peak bytes": 32 << 20}

    def row(model: str, beam: int, median: float, source: int = 64, length: int = 64) -> dict[str, Any]:
        seconds = {"median": median, "lower": median, "upper": 2 * median}
        return {"model": model, "beam": beam, "source": source, "length": length, "seconds": seconds, **sizes}

    rows = [
        row("transformer", 4, 0.6),
        row("transformer", 4, 0.9, 99, 99),
        row("elu", 4, 0.3),
        row("elu", 4, 0.3, 99, 99),
    ]
    whole = [row("transformer", 4, 6.4), row("elu", 4, 3.2)]
    record = {"settings": {"hypotheses": 8, "source": 64}, "rows": rows, "whole": whole, "cut": ["some rounds"]}
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in render(record).splitlines()]
    assert ["elu", "64", "64", "300 (300 – 600)", "2.00 x", "1.00 MiB", "2.00 MiB", "32.0 MiB"] in table
    assert ["elu", "99", "99", "300 (300 – 600)", "3.00 x", "1.00 MiB", "2.00 MiB", "32.0 MiB"] in table
    assert ["elu", "3.20 (3.20 – 6.40)", "50.0", "2.00 x"] in table
    assert ["- cut to keep to the budget: some rounds"] in table
