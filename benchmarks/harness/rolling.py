"""Generation that rolls forward: turns of some tokens one after the other, from caches of a given length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from harness.timing import Budget, Call, Clock, clock_for, time_in_turns

TOKENS_OF_A_TURN = 3


def fill_cache(layers: Iterable[Any], state: dict[str, Any], rows: int, length: int, device: torch.device) -> None:
    """Puts random keys and values of `length` tokens in the state, as the self-attention of these layers would.

    fairseq's incremental decoding reads one token at a time: to read them all would take minutes.
    """
    for layer in layers:
        attention = layer.self_attn
        shape = (rows, attention.num_heads, length, attention.head_dim)
        cache = {what: torch.randn(shape, device=device) for what in ("prev_key", "prev_value")}
        attention._set_input_buffer(state, {**cache, "prev_key_padding_mask": None})


class TurnClock:
    """Times some tokens one after the other, of a generation that each turn takes up: a call gives what makes a token.

    The token before them is not timed. It finds memory as the other contestants left it; in generation, a token finds
    it as the token before left it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def seconds(self, call: Callable[[], Call], repeats: int, host: float = 0.0) -> float:
        step = call()
        step()
        return self._clock.seconds(step, repeats, host)

    def repeats(self, seconds: float) -> int:
        return TOKENS_OF_A_TURN


def time_tokens(
    take_ups: dict[str, Callable[[], Call]], device: str, rounds: int, budget: Budget
) -> tuple[dict[str, dict[str, float]], int]:
    """Times a token of generations against each other: a turn of each that does not count, and then the rounds.

    Args:
        take_ups: what `TurnClock` calls.
        device: the torch device that makes the tokens.
        rounds: turns of each, if the budget allows as many.
        budget: for all of it, the first turn included.

    Returns:
        what `timing.time_in_turns` does.
    """
    clock = TurnClock(clock_for(device))
    warm = {}
    for name, take_up in take_ups.items():
        start = time.perf_counter()
        clock.seconds(take_up, TOKENS_OF_A_TURN)
        warm[name] = (time.perf_counter() - start) / TOKENS_OF_A_TURN
    return time_in_turns(take_ups, warm, clock, rounds=rounds, allowed=max(0.0, budget.left))
