"""Forms of the adaptive input and softmax that fairseq does not have: without square projections, and with biases.

The functions change modules after they are built: those of fairseq, and those of `huggingface.vocabulary`, which have
the same parts. `embeddings` are pairs of an embedding and a projection, `tail` triples of a projection, a dropout and
an output layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SQUARE_PROJECTIONS = ("keep", "identity", "none")


def leave_out_square_projections(embeddings: Any = None, softmax: Any = None) -> None:
    """Removes the projections between equal sizes, and the dropout after those of the softmax.

    Args:
        embeddings: an adaptive input; None if there is none.
        softmax: an adaptive softmax; None if there is none.
    """
    for cluster in () if embeddings is None else embeddings.embeddings:
        if _is_square(cluster[1]):
            cluster[1] = nn.Identity()
    for cluster in () if softmax is None else softmax.tail:
        if _is_square(cluster[0]):
            cluster[0], cluster[1] = nn.Identity(), nn.Identity()


def start_as_identity(embeddings: Any = None, softmax: Any = None) -> None:
    """Sets the projections between equal sizes to the identity; the arguments are as above."""
    for projection in _projections(embeddings, softmax):
        if _is_square(projection):
            nn.init.eye_(projection.weight)


def add_biases(softmax: Any) -> None:
    """Adds a bias for each token to an adaptive softmax, and one for each cluster to its first."""
    _add_bias(softmax.head, softmax.cutoff[0] + len(softmax.tail))
    for cluster, first, end in zip(softmax.tail, softmax.cutoff[:-1], softmax.cutoff[1:], strict=True):
        _add_bias(cluster[2], end - first)


def _projections(embeddings: Any, softmax: Any) -> Iterator[Any]:
    yield from () if embeddings is None else (cluster[1] for cluster in embeddings.embeddings)
    yield from () if softmax is None else (cluster[0] for cluster in softmax.tail)


def _is_square(projection: nn.Module) -> bool:
    weight = getattr(projection, "weight", None)
    return isinstance(weight, Tensor) and weight.shape[0] == weight.shape[1]


def _add_bias(layer: nn.Module, size: int) -> None:
    layer.register_parameter("bias", nn.Parameter(torch.zeros(size)))
    if not isinstance(layer, nn.Linear):  # others share their weights with the input, and add no bias
        layer.register_forward_hook(_plus_bias)


def _plus_bias(layer: Any, _: Any, out: Tensor) -> Tensor:
    biased: Tensor = out + layer.bias
    return biased
