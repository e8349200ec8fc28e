"""The weights of a source, and the weights of the converted model that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_EOS, _SPECIAL = 2, 4  # in fairseq's dictionary: the place of </s>, and how many places come before the words


@dataclass(frozen=True)
class Weight:
    """Weights of the source that belong together, with their shapes, and the converted model's that hold the same."""

    shapes: dict[str, tuple[int, ...]]
    ours: tuple[str, ...]
    split: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    join: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


def single(
    name: str,
    shape: tuple[int, ...],
    ours: tuple[str, ...],
    split: Callable[[Tensor], tuple[Tensor, ...]],
    join: Callable[[tuple[Tensor, ...]], Tensor],
) -> Weight:
    """One weight of the source."""
    return Weight({name: shape}, ours, lambda x: split(x[0]), lambda parts: (join(parts),))


def plain(name: str, ours: str, *shape: int) -> Weight:
    """A weight that is used as it is."""
    return single(name, shape, (ours,), lambda x: (x,), lambda parts: parts[0])


def stacked(names: tuple[str, ...], ours: str, rows: tuple[int, ...], *shape: int) -> Weight:
    """Weights with so many rows that are one weight here, one below the other."""
    shapes = {name: (n, *shape) for name, n in zip(names, rows, strict=True)}
    return Weight(shapes, (ours,), lambda x: (torch.cat(x),), lambda parts: parts[0].split(rows))


def unstacked(name: str, ours: tuple[str, ...], rows: tuple[int, ...], *shape: int) -> Weight:
    """A weight whose parts, of so many rows, are weights of their own here."""
    return single(name, (sum(rows), *shape), ours, lambda x: x.split(rows), torch.cat)


def norm(name: str, ours: str, width: int) -> Iterator[Weight]:
    """A layer norm."""
    for kind in ("weight", "bias"):
        yield plain(f"{name}.{kind}", f"{ours}.{kind}", width)


def linear(name: str, ours: str, width_in: int, width_out: int, transposed: bool = False) -> Iterator[Weight]:
    """A linear layer; GPT-2's ("Conv1D") have inputs in rows and outputs in columns."""
    if transposed:
        yield single(
            f"{name}.weight",
            (width_in, width_out),
            (f"{ours}.weight",),
            lambda x: (x.t(),),
            lambda parts: parts[0].t(),
        )
    else:
        yield plain(f"{name}.weight", f"{ours}.weight", width_out, width_in)
    yield plain(f"{name}.bias", f"{ours}.bias", width_out)


def fused(name: str, ours: str, width: int, heads: int, interleaved: bool) -> Iterator[Weight]:
    """Queries, keys and values in one layer.

    GPT-2 has all queries, all keys, all values, side by side in columns; GPT-NeoX, in rows, the query, key and value of
    the first head, then those of the second, and so on: `interleaved`.
    """

    def separate(x: Tensor) -> tuple[Tensor, ...]:
        if not interleaved:
            return tuple(part.t() if x.dim() == 2 else part for part in x.chunk(3, dim=-1))
        return tuple(part.reshape(width, *x.shape[1:]) for part in x.view(heads, 3, -1, *x.shape[1:]).unbind(1))

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        if not interleaved:
            return torch.cat([part.t() if part.dim() == 2 else part for part in parts], dim=-1)
        return torch.stack([part.reshape(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)

    projections = ("q_proj", "k_proj", "v_proj")
    shape = (3 * width, width) if interleaved else (width, 3 * width)
    yield single(f"{name}.weight", shape, tuple(f"{ours}.{p}.weight" for p in projections), separate, join)
    yield single(f"{name}.bias", (3 * width,), tuple(f"{ours}.{p}.bias" for p in projections), separate, join)


def embedding(name: str, ours: str, vocabulary: int, width: int, end: int) -> Weight:
    """Embeddings; special symbols that the source lacks get rows of zeros, which the conversion back removes."""

    def split(x: Tensor) -> tuple[Tensor, ...]:
        none = x.new_zeros(1, width)
        return (torch.cat([none, none, x[end : end + 1], none, x[:end], x[end + 1 :]]),)

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        words = parts[0][_SPECIAL:]
        return torch.cat([words[:end], parts[0][_EOS : _EOS + 1], words[end:]])

    return single(name, (vocabulary, width), (ours,), split, join)
