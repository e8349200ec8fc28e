"""Meters that read numbers of a GPU when a value is asked for, many at once, and not when they are updated.

Reading a loss after every update makes the GPU wait after every update; the losses of a hundred updates can be read
together.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

MOST = 1000
"""So many updates are read together at the latest."""


class Settled:
    """An attribute of a meter: before it is read, the updates that the meter has kept are added."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name  # where it would be without this class, as in meters of old checkpoints

    def __get__(self, meter: Any, kind: type) -> Any:
        settle(meter)
        return vars(meter)[self._name]

    def __set__(self, meter: Any, value: Any) -> None:
        # A value that is set, as by reset(), replaces all updates.
        vars(meter).pop("_late", None)
        vars(meter)[self._name] = value


def is_kept(meter: Any, *values: Any) -> bool:
    """Keeps the values of an update, if one is a tensor, until a `Settled` attribute is read; True if it keeps them."""
    late = vars(meter).setdefault("_late", [])
    if not late and not any(torch.is_tensor(x) and x.numel() == 1 for x in values):
        return False
    late.append(values)
    if len(late) >= MOST:
        settle(meter)
    return True


def settle(meter: Any) -> None:
    """Updates a meter with the values that it has kept, now as numbers of Python."""
    late = vars(meter).pop("_late", [])
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for x in (x for values in late for x in values if torch.is_tensor(x) and x.numel() == 1):
        kinds[x.device, x.dtype].append(x)
    numbers: dict[int, Any] = {}
    # One copy to the CPU, which waits for the GPU, for each device and type.
    for found in kinds.values():
        read = torch.stack([x.detach().reshape(()) for x in found]).tolist()
        numbers |= {id(x): number for x, number in zip(found, read, strict=True)}
    for values in late:
        meter.update(*(numbers.get(id(x), x) if torch.is_tensor(x) else x for x in values))


class LateNumbers:
    """Numbers that are read when the next ones are being computed: by then they are there."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Any, Any] | None = None

    def exchange(self, x: Tensor, of: Any) -> tuple[Tensor | None, Any]:
        """Gives `x` and the samples `of` which it is, and takes the last ones given; None and None the first time."""
        on_gpu = x.device.type == "cuda"
        # Pinned memory lets the copy run beside later operators; the event tells when it is done.
        numbers = torch.empty(x.shape, dtype=x.dtype, pin_memory=on_gpu).copy_(x, non_blocking=True)
        done = torch.cuda.Event() if on_gpu else None
        if done is not None:
            done.record()
        last, self._last = self.take(), (numbers, done, of)
        return last

    def take(self) -> tuple[Tensor | None, Any]:
        """Takes the number and the samples that were given last."""
        if self._last is None:
            return None, None
        (numbers, done, of), self._last = self._last, None
        if done is not None:
            done.synchronize()
        return numbers, of


class LateValues(Mapping[str, Any]):
    """A dictionary that `find` makes when an entry is asked for."""

    def __init__(self, find: Callable[[], dict[str, Any]]) -> None:
        self._find = find
        self._found: dict[str, Any] | None = None

    def _known(self) -> dict[str, Any]:
        if self._found is None:
            self._found = self._find()
        return self._found

    def __getitem__(self, key: str) -> Any:
        return self._known()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())
