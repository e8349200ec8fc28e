"""Finds the cluster of each token of an adaptive vocabulary on the CPU, where the batch comes from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from fairseq import host_copies
from torch import Tensor


class Clusters(NamedTuple):
    """The tokens of a batch, ordered by cluster.

    Attributes:
        places: for each cluster, the places of its tokens in the flattened batch; None for a cluster without tokens.
        ids: for each cluster, its token ids less the cluster's first; None for a cluster without tokens.
        heads: (tokens,), in the batch's order, the targets of the first softmax: the id of a token of the first
            cluster; for others the number of the cluster, after all ids of the first.
        back: (tokens,), the place of each of the batch's tokens among those of all clusters, one after the other.
    """

    places: list[Tensor | None]
    ids: list[Tensor | None]
    heads: Tensor
    back: Tensor


def find(tokens: Tensor, ends: Sequence[int]) -> Clusters:
    """Sorts `tokens`, of any shape, into clusters that end before the ids `ends`.

    Raises:
        ValueError: for an id beyond the last cluster.
    """
    flat = host_copies.on_host(tokens).reshape(-1).numpy()
    # The number of ends that are at most the id is the number of its cluster.
    cluster = np.searchsorted(np.asarray(ends), flat, side="right")
    if flat.size and not 0 <= flat.min() <= flat.max() < ends[-1]:
        raise ValueError(f"token ids range from {flat.min()} to {flat.max()}; they must be from 0 to {ends[-1] - 1}")
    counts = np.bincount(cluster, minlength=len(ends)).tolist()
    order = np.argsort(cluster.astype(np.uint8), kind="stable")
    # rank is the inverse of the permutation `order`.
    rank = np.empty_like(order)
    rank[order] = np.arange(flat.size)
    starts = np.asarray([0, *ends[:-1]])
    first = np.where(cluster > 0, ends[0] + cluster - 1, flat)
    # One copy to the device for all four.
    lists = torch.from_numpy(np.stack([order, (flat - starts[cluster])[order], first, rank]))
    ordered, ids, heads, back = host_copies.move(lists, tokens.device).unbind()
    places, parts = ([x if len(x) else None for x in of.split(counts)] for of in (ordered, ids))
    return Clusters(places, parts, heads, back)
