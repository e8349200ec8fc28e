"""A turn of a generation is some tokens one after the other; the first of them is not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import rolling
from harness.rolling import TOKENS_OF_A_TURN, TurnClock
from harness.timing import Budget, CpuClock


def test_the_first_token_of_a_turn_is_not_timed() -> None:
    turns: list[list[str]] = []

    def take_up() -> Callable[[], None]:
        turns.append([])
        return lambda: turns[-1].append("token")

    class CountingClock(CpuClock):
        def seconds(self, call: Callable[[], Any], repeats: int, host: float = 0.0) -> float:
            assert turns[-1] == ["token"]
            return super().seconds(call, repeats)

    clock = TurnClock(CountingClock())
    assert clock.repeats(1e-6) == clock.repeats(10.0) == TOKENS_OF_A_TURN
    clock.seconds(take_up, 3)
    clock.seconds(take_up, 3)
    assert turns == [["token"] * 4] * 2


@pytest.mark.parametrize(("allowed", "rounds"), [(float("inf"), 5), (0.0, 3)])
def test_a_turn_of_each_does_not_count(allowed: float, rounds: int) -> None:
    made: list[str] = []
    take_ups = {name: lambda name=name: lambda: made.append(name) for name in "ab"}
    seconds, rounds_made = rolling.time_tokens(take_ups, "cpu", 5, Budget(allowed))
    assert made == [name for name in "ab" for _ in range(TOKENS_OF_A_TURN + 1)] * (rounds + 1)
    assert rounds_made == rounds and [seconds[name]["rounds"] for name in "ab"] == [rounds] * 2


def test_a_cache_of_any_length_is_that_of_the_layers_attention() -> None:
    class Attention:
        num_heads, head_dim = 2, 3

        def _set_input_buffer(self, state: dict[str, Any], buffer: dict[str, Any]) -> None:
            state[self] = buffer

    class Layer:
        def __init__(self) -> None:
            self.self_attn = Attention()

    layers, state = [Layer(), Layer()], {}
    rolling.fill_cache(layers, state, 4, 5, torch.device("cpu"))
    assert list(state) == [layer.self_attn for layer in layers]
    for buffer in state.values():
        assert buffer["prev_key"].shape == buffer["prev_value"].shape == (4, 2, 5, 3)
        assert buffer["prev_key_padding_mask"] is None
