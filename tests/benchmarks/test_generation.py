"""What a generated token is measured from is what generation itself would have left."""

from __future__ import annotations

import generation
import pytest
import torch
from harness.memory import held, peak

MEBIBYTE = 2**20


@pytest.mark.parametrize("name", [generation.TRANSFORMER, "delta", "decay", "sum"])
def test_states_are_those_of_generation(name: str) -> None:
    settings = generation.QUICK_SETTINGS
    model = generation.build(name, settings, "chunkwise", longest=8)
    tokens = torch.randint(4, 20, (settings["batch"], 6))
    generated: dict = {}
    with torch.no_grad():
        for end in range(1, 6):
            model(tokens[:, :end], incremental_state=generated)
        state = generation.state_after(model, name, tokens)

    def tensors(state: dict) -> list[tuple[str, str, torch.Size]]:
        return sorted((key, n, x.shape) for key, buffer in state.items() for n, x in buffer.items() if x is not None)

    assert tensors(state) == tensors(generated)
    before = tensors(state)
    _, after = generation.next_token(model, tokens, state)()
    assert tensors(state) == before  # a call can be made again
    assert (held(after) > held(state)) == (name == generation.TRANSFORMER)


def test_the_peak_of_a_token_counts_one_layers_cache_twice() -> None:
    settings = {**generation.QUICK_SETTINGS, "layers": 5}
    model = generation.build(generation.TRANSFORMER, settings, "chunkwise", longest=2000)
    tokens = torch.randint(4, 20, (settings["batch"], 2001))
    with torch.no_grad():
        size = held(generation.state_after(model, generation.TRANSFORMER, tokens))
    peak_size = generation.peak_memory(model, generation.TRANSFORMER, tokens, "cpu")
    # The cache, a copy of one layer's with the new token in it, and the weights of attention and other small tensors.
    assert 1.2 * size < peak_size < 1.3 * size


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
