"""What a call takes at a time."""

from __future__ import annotations

import torch
from harness.memory import held, peak


def test_the_peak_of_a_call_counts_what_lives_at_the_same_time() -> None:
    def megabytes(number: int) -> torch.Tensor:
        return torch.empty(number << 20, dtype=torch.uint8)

    def prepare() -> list[torch.Tensor]:
        megabytes(50)  # gone before the call
        return [megabytes(4)]

    def call(state: list[torch.Tensor]) -> torch.Tensor:
        first = megabytes(1)
        del first
        second, third = megabytes(1), megabytes(2)  # with the state, 7 in all
        del second
        state[0] = megabytes(1)  # in place of 4, once it is there
        return third

    assert peak(prepare, call, "cpu") == 7 << 20
    assert held({"a": [torch.zeros(3), None], "b": {"y": torch.zeros(2, dtype=torch.float64)}}) == 28
