"""What a generated token is measured from is what generation itself would have left."""

from __future__ import annotations

import argparse
import sys
from typing import Any, ClassVar

import generation
import pytest
import torch
from harness.memory import held, peak
from harness.next_token_tables import render
from harness.timing import CpuClock

MEBIBYTE = 2**20
NAMES = (generation.TRANSFORMER, *generation.RULES)
SETTINGS = generation.QUICK_SETTINGS
ROWS = SETTINGS["batch"]


def build(name: str, settings: dict[str, int] = SETTINGS, longest: int = 40) -> Any:
    return generation.build(name, settings, "chunkwise", longest)


def draw_tokens(length: int) -> torch.Tensor:
    return torch.randint(4, SETTINGS["words"], (ROWS, length))


def shapes(state: dict[str, Any]) -> list[tuple[str, str, torch.Size]]:
    return sorted((key, n, x.shape) for key, buffer in state.items() for n, x in buffer.items() if x is not None)


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_generation(name: str) -> None:
    model, tokens = build(name), draw_tokens(8)
    generated: dict[str, Any] = {}
    with torch.no_grad():
        for end in range(1, 6):
            model(tokens[:, :end], incremental_state=generated)
    started = generation.generation_after(model, name, tokens, 5)
    assert shapes(started.state) == shapes(generated)
    for end in (6, 7):  # and they go on as those do
        with torch.no_grad():
            model(tokens[:, :end], incremental_state=generated)
        assert started.advance().shape == (ROWS, 1, len(model.decoder.dictionary))
        assert started.length == end and shapes(started.state) == shapes(generated)


def test_a_token_is_the_next_one() -> None:
    model, tokens = build("delta"), draw_tokens(6)
    rolling = generation.generation_after(model, "delta", tokens, 1)
    steps = torch.cat([rolling.advance() for _ in range(5)], dim=1)
    with torch.no_grad():
        expected = model(tokens)[0][:, 1:]
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-5)  # float32 in another order


class NotingClock(CpuClock):
    """Notes how many tokens there are before each that is timed, by turn."""

    turns: ClassVar[list[tuple[Any, list[int]]]] = []

    def seconds(self, call: Any, repeats: int, host: float = 0.0) -> float:
        rolling = getattr(call, "__self__", None)
        lengths: list[int] = []
        self.turns.append((rolling, lengths))

        def noted() -> None:
            if rolling is not None:
                lengths.append(rolling.length)
            call()

        return super().seconds(noted, repeats)


def test_models_take_turns_and_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rolling.clock_for", lambda device: NotingClock())
    monkeypatch.setattr(NotingClock, "turns", [])
    models = {name: build(name) for name in (generation.TRANSFORMER, "sum")}
    options = argparse.Namespace(rounds=4, device="cpu")
    generations = {name: generation.generation_after(model, name, draw_tokens(45), 1) for name, model in models.items()}
    rows, made = generation.measure_length(generations, 32, options, allowed=60.0)
    assert made == 4 and [row["model"] for row in rows] == list(models)
    # A turn of each that does not count, and the rounds. The cache alone comes after them.
    turns_of = [rolling and rolling.model for rolling, _ in NotingClock.turns]
    assert turns_of == [*models.values()] * 5 + [None] * 4
    for row, model in zip(rows, models.values(), strict=True):
        turns = [lengths for rolling, lengths in NotingClock.turns if rolling and rolling.model is model]
        # Three are timed, and one between the turns is not.
        assert turns == [list(range(first, first + 3)) for first in range(turns[0][0], turns[0][0] + 20, 4)]
        assert (row["first"], row["last"]) == (turns[1][0], turns[-1][-1])
        assert abs((row["first"] + row["last"]) / 2 - row["length"]) <= 1
        assert row["seconds"]["min"] > 0 and row["seconds"]["rounds"] == 4
        assert ("cache seconds" in row) == (row["model"] == generation.TRANSFORMER)


def test_lengths_of_a_model_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rolling.clock_for", lambda device: NotingClock())
    monkeypatch.setattr(NotingClock, "turns", [])
    options = argparse.Namespace(rounds=4, device="cpu")
    lengths = (14, 30)
    seconds, made = generation.measure_growth(build("sum"), "sum", draw_tokens(45), lengths, options, allowed=60.0)
    assert made == 4 and tuple(seconds) == lengths
    turns = [timed for _, timed in NotingClock.turns]
    assert len(turns) == 2 * 5
    for number, length in enumerate(lengths):
        own = turns[number::2]
        assert own == [list(range(first, first + 3)) for first in range(own[0][0], own[0][0] + 20, 4)]
        assert abs((own[1][0] + own[-1][-1]) / 2 - length) <= 1
        assert seconds[length]["rounds"] == 4


@pytest.mark.parametrize("most_read", [3, 20])
@pytest.mark.parametrize("name", ["transformer", "sum"])
def test_a_generation_comes_to_a_length_with_its_state(
    name: str, most_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MOST_READ", most_read)
    model, tokens = build(name), draw_tokens(20)
    rolling = generation.generation_after(model, name, tokens, 2)
    kept = {key: buffer.get("prev_key") for key, buffer in rolling.state.items()}
    generation.go_on(rolling, name, 12)
    assert rolling.length == 12
    assert shapes(rolling.state) == shapes(generation.generation_after(model, name, tokens, 12).state)
    if name == "transformer":  # what was there before is still there, unless it was too far to read
        for key, old in kept.items():
            new = rolling.state[key]["prev_key"][:, :, :2]
            assert torch.equal(new, old) == (most_read == 20)


def test_a_stretch_that_begins_before_the_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generation.py", "--rounds", "30"])
    monkeypatch.setattr(generation, "build", lambda *_: pytest.fail("it built a model"))
    with pytest.raises(SystemExit):
        generation.main()
    assert "--rounds is 30: it may be 29 at most" in capsys.readouterr().err


def test_sizes_are_those_at_the_length_with_one_layers_cache_twice() -> None:
    model = build(generation.TRANSFORMER, {**SETTINGS, "layers": 5}, longest=2001)
    sizes = generation.memory(model, generation.TRANSFORMER, draw_tokens(2001), 2000, "cpu")
    size = 2 * 5 * ROWS * SETTINGS["width"] * 2000 * 4
    assert sizes["state bytes"] == size
    # The cache, a copy of one layer's with the new token in it, and the weights of attention and other small tensors.
    assert 1.2 * size < sizes["peak bytes"] < 1.3 * size


def test_the_ratio_is_expected_to_grow_with_the_time_of_the_cache() -> None:
    def row(model: str, length: int, median: float, **more: Any) -> dict[str, Any]:
        seconds = {"median": median, "lower": median, "upper": 2 * median}
        return {
            **{"model": model, "length": length, "first": length - 3, "last": length + 3, "seconds": seconds},
            **{"state bytes": 1 << 20, "peak bytes": 2 << 20, **more},
        }

    rows = [
        row("transformer", 64, 0.010, **{"cache seconds": {"median": 0.001}}),
        row("transformer", 1000, 0.040, **{"cache seconds": {"median": 0.021}}),
        row("sum", 64, 0.020, **{"seconds beside other lengths": {"median": 0.015}}),
        row("sum", 1000, 0.010, **{"seconds beside other lengths": {"median": 0.016}}),
    ]
    table = render({"parameters": {"transformer": 1, "sum": 1}, "rows": rows, "cut": ["some rounds"]})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    sizes = ["1.00 MiB", "2.00 MiB"]
    assert ["transformer", "1,000 (997 – 1,003)", "40.0 (40.0 – 80.0)", "1.00 x", "–", "–", *sizes] in cells
    assert ["sum", "64 (61 – 67)", "20.0 (20.0 – 40.0)", "0.5 x", "0.5 x", "15.0", *sizes] in cells
    assert ["sum", "1,000 (997 – 1,003)", "10.0 (10.0 – 20.0)", "4.00 x", "1.50 x", "16.0", *sizes] in cells
    assert ["- cut to keep to the budget: some rounds"] in cells


def megabytes(number: int) -> torch.Tensor:
    return torch.empty(number * MEBIBYTE, dtype=torch.uint8)


def test_the_peak_of_a_call_counts_what_lives_at_the_same_time() -> None:
    def prepare() -> list[torch.Tensor]:
        megabytes(50)  # gone before the call
        return [megabytes(4)]

    def call(state: list[torch.Tensor]) -> torch.Tensor:
        first = megabytes(1)
        del first
        second = megabytes(1)
        third = megabytes(2)  # with the state, 7 in all
        del second
        state[0] = megabytes(1)  # in place of 4, once it is there
        return third

    assert peak(prepare, call, "cpu") == 7 * MEBIBYTE


def test_the_size_of_a_state_is_that_of_its_tensors() -> None:
    assert held({"a": {"x": torch.zeros(3), "mask": None}, "b": {"y": torch.zeros(2, dtype=torch.float64)}}) == 28
