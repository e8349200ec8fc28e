"""Finds which words of a batch are in which band of an adaptive vocabulary, on the CPU that the batch comes from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from fairseq import host_copies
from torch import Tensor


class Bands(NamedTuple):
    """The words of a batch, ordered by their bands.

    Attributes:
        places: for each band, where its words are in the flattened batch; None for a band without words.
        numbers: for each band, its words, counted from the band's first; None for a band without words.
        heads: (words,), in the batch's order, the word if it is in the first band, and otherwise the number of its band
            after all words of the first.
        back: (words,), where each of the batch's words is among those of all bands, one band after the other.
    """

    places: list[Tensor | None]
    numbers: list[Tensor | None]
    heads: Tensor
    back: Tensor


def find(words: Tensor, ends: Sequence[int]) -> Bands:
    """Sorts `words`, of any shape, into bands that end before the words `ends`.

    Raises:
        ValueError: for a word beyond the last band.
    """
    flat = host_copies.on_host(words).reshape(-1).numpy()
    band = np.searchsorted(np.asarray(ends), flat, side="right")
    if flat.size and not 0 <= flat.min() <= flat.max() < ends[-1]:
        raise ValueError(f"words range from {flat.min()} to {flat.max()}; they must be from 0 to {ends[-1] - 1}")
    counts = np.bincount(band, minlength=len(ends)).tolist()
    order = np.argsort(band.astype(np.uint8), kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(flat.size)
    starts = np.asarray([0, *ends[:-1]])
    first = np.where(band > 0, ends[0] + band - 1, flat)
    lists = torch.from_numpy(np.stack([order, (flat - starts[band])[order], first, rank]))
    ordered, numbers, heads, back = host_copies.move(lists, words.device).unbind()
    places, parts = ([x if len(x) else None for x in of.split(counts)] for of in (ordered, numbers))
    return Bands(places, parts, heads, back)
