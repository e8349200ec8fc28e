"""The two settings' sequences of key-value pairs, and their queries.

Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers" (ICML 2021), Sec. 6.1. Keys and
values are numbers from 0 to S - 1; everything is drawn from torch's global generator of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SETTINGS = {1: "capacity: L = S, without replacement", 2: "update rules: L = 2 S, with replacement"}


@dataclass(frozen=True)
class Sequences:
    """Pairs that are written one after the other."""

    keys: Tensor  # (batch, length), integers from 0 to `size` - 1
    values: Tensor  # the same
    size: int  # S, how many keys, and how many values, there are

    def latest(self) -> Tensor:
        """The place where each key was written last: (batch, size), -1 for a key that was not written."""
        batch, length = self.keys.shape
        positions = torch.arange(length, device=self.keys.device).expand(batch, length)
        never = torch.full((batch, self.size), -1, device=self.keys.device)
        return never.scatter_reduce(1, self.keys, positions, "amax")


def sequence_length(setting: int, size: int) -> int:
    """L, for S = `size`."""
    return size if setting == 1 else 2 * size


def draw_sequences(
    setting: int, size: int, batch: int, device: torch.device | str = "cpu", length: int | None = None
) -> Sequences:
    """Draws `batch` sequences of `length` pairs, by default as many as the setting has.

    In Setting 1 each key and each value occurs once, in an order of its own; in Setting 2 both are drawn anew for
    every pair.
    """
    shape = (batch, length or sequence_length(setting, size))
    if setting == 1:
        # The order of random numbers is a random permutation.
        keys, values = (torch.rand(shape, device=device).argsort(dim=1) for _ in range(2))
    else:
        keys, values = (torch.randint(size, shape, device=device) for _ in range(2))
    return Sequences(keys, values, size)


def draw_queries(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Chooses one of the L keys of each sequence.

    Returns (batch, 1), the key; (batch, 1), the value that was written under it last.
    """
    batch, length = sequences.keys.shape
    position = torch.randint(length, (batch, 1), device=sequences.keys.device)
    query = sequences.keys.gather(1, position)
    return query, sequences.values.gather(1, sequences.latest().gather(1, query))


def all_queries(sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Every key there is.

    Returns (batch, size), the keys; (batch, size), the value that was written last under each, any where there is none;
    (batch, size), whether the sequence has the key, so that it can be asked for.
    """
    latest = sequences.latest()
    queries = torch.arange(sequences.size, device=latest.device).expand_as(latest)
    return queries, sequences.values.gather(1, latest.clamp(min=0)), latest >= 0
