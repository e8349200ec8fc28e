"""What a generated token is measured from is what generation itself would have left."""

from __future__ import annotations

import argparse
from functools import cache, partial
from typing import Any

import generation
import pytest
import torch
from generation import TRANSFORMER, generation_after
from harness.timing import Clock

from tests.benchmarks.conftest import Run

SETTINGS = generation.QUICK_SETTINGS
ROWS = SETTINGS["batch"]


@cache
def build(name: str, longest: int = 40, **settings: int) -> Any:
    return generation.build(name, SETTINGS | settings, "chunkwise", longest)


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
    rolling = generation_after(model, name, tokens, 2)
    assert shapes(rolling.state) == generated[2]
    kept = {key: buffer.get("prev_key") for key, buffer in rolling.state.items()}
    rolling.go_on(name, 12, most_read)
    assert rolling.length == 12 and shapes(rolling.state) == generated[12]
    if name == TRANSFORMER:  # what was there before is still there, unless it was too far to read
        same = [torch.equal(rolling.state[key]["prev_key"][:, :, :2], old) for key, old in kept.items()]
        assert same == [most_read == 20] * len(same)
    for end in (13, 14):  # and it goes on as generation does
        assert rolling.advance().shape == (ROWS, 1, len(model.decoder.dictionary))
        assert rolling.length == end and shapes(rolling.state) == generated[end]


def test_a_token_is_the_next_one() -> None:
    model, tokens = build("delta"), draw_tokens(6)
    rolling = generation_after(model, "delta", tokens, 1)
    steps = torch.cat([rolling.advance() for _ in range(5)], dim=1)
    with torch.no_grad():
        expected = model(tokens)[0][:, 1:]
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-5)  # float32 in another order


def test_in_turns_each_goes_on_where_it_stopped_around_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[Any, list[int]]] = []

    class NotingClock(Clock):
        """Notes by turn whose it is, and how many tokens there are before each that is timed."""

        def seconds(self, call: Any, repeats: int, host: float = 0.0) -> float:
            rolling = getattr(call, "__self__", None)
            turns.append((rolling, []))
            return super().seconds(lambda: (rolling and turns[-1][1].append(rolling.length)) or call(), repeats)

    monkeypatch.setattr("harness.timing.clock_for", lambda device: NotingClock())
    options = argparse.Namespace(rounds=4, device="cpu")
    models = {name: build(name) for name in (TRANSFORMER, "sum")}
    tokens = draw_tokens(45)
    generations = {name: generation_after(model, name, tokens, 1) for name, model in models.items()}
    rows, made = generation.measure_length(generations, 32, options, allowed=60.0)
    assert made == 4 and [row["model"] for row in rows] == list(models)
    assert ["cache seconds" in row for row in rows] == [True, False]
    # A turn of each that does not count, and the rounds. The cache alone comes after them.
    assert [rolling for rolling, _ in turns] == [*generations.values()] * 5 + [None] * 4
    measured = {32: [turns[0:10:2], turns[1:10:2]]}
    turns = []
    seconds, made = generation.measure_growth(models["sum"], "sum", tokens, (14, 30), options, allowed=60.0)
    assert made == 4 and [each["rounds"] for each in (*seconds.values(), *(row["seconds"] for row in rows))] == [4] * 4
    for length, stretches in (measured | {14: [turns[::2]], 30: [turns[1::2]]}).items():
        for stretch in stretches:
            lengths = [timed for _, timed in stretch]
            # Three are timed, and one between the turns is not.
            assert lengths == [list(range(first, first + 3)) for first in range(lengths[0][0], lengths[0][0] + 20, 4)]
            assert abs((lengths[1][0] + lengths[-1][-1]) / 2 - length) <= 1
    assert {(row["first"], row["last"]) for row in rows} == {(measured[32][0][1][1][0], measured[32][0][-1][1][-1])}


def test_a_stretch_that_begins_before_the_text_is_refused(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(generation, "build", partial(pytest.fail, "it built a model"))
    assert "--rounds is 30: it may be 29 at most, or" in run("generation", "--rounds", 30)


def test_sizes_are_those_at_the_length_with_one_layers_cache_twice() -> None:
    model = build(TRANSFORMER, longest=501, layers=5)
    sizes = generation.memory(model, TRANSFORMER, draw_tokens(501), 500, "cpu")
    size = 2 * 5 * ROWS * SETTINGS["width"] * 500 * 4
    assert sizes["state bytes"] == size
    # The cache, a copy of one layer's with the new token in it, and the weights of attention and other small tensors.
    assert 1.2 * size < sizes["peak bytes"] < 1.3 * size
