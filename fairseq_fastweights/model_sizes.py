"""How large a model may be that a file asks for by its settings, and which of these make it so large.

It knows nothing but Python, so that `tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_TIMES, _MORE = 8, 2**26
_FEW = 100


def most_bytes(size: int) -> int:
    """How many bytes the tensors of a model may have, in float32, whose weights are in `size` bytes.

    There are more than were saved: other types have fewer bytes, and tables are in no file.
    """
    return _TIMES * size + _MORE


def most_layers(tensors: int) -> int:
    """How many layers a model may have of which a file holds so many tensors."""
    return max(_FEW, tensors)


def whole_numbers(settings: Mapping[str, Any]) -> dict[str, int]:
    """The whole numbers among settings and within them, and the lengths of lists."""
    found = {}
    for name, value in settings.items():
        if isinstance(value, int) and not isinstance(value, bool):
            found[name] = value
        elif isinstance(value, Mapping):
            found |= whole_numbers(value)
        elif isinstance(value, (list, tuple)):
            found[f"the length of {name}"] = len(value)
    return found


def likely(numbers: dict[str, int], shape: Iterable[int] = ()) -> str:
    """Names the setting that most likely made a tensor of this shape: a large part of its size, or the largest.

    Examples:
        >>> likely({"layers": 2, "width": 2000, "other": 5000}, (32, 4000))
        'width is 2000'
    """
    sizes = tuple(shape)
    size, longest = math.prod(sizes), max(sizes, default=0)

    def rank(name: str) -> tuple[bool, int]:
        value = numbers[name]
        return 0 < longest <= value * value and size % value == 0, value

    likeliest = sorted(numbers, key=rank, reverse=True)[:2]
    named = [f"{name} is {numbers[name]}" for name in likeliest if name == likeliest[0] or numbers[name] in sizes]
    return " and ".join(named) or "no setting is a number"
