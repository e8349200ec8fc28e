"""The GPUs that this process may use, and which of them each command gets."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """The GPUs that torch sees, by the names that `VARIABLE` has for them."""
    import torch  # which takes its time

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    return (named or [str(number) for number in range(count)])[:count]


class Devices:
    """Hands out GPUs: those that fewest commands have. `names`: all that there are."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._users = Counter(dict.fromkeys(names, 0))

    def take(self, count: int) -> list[str]:
        taken = sorted(self.names, key=self._users.__getitem__)[:count]
        self._users.update(taken)
        return taken

    def give_back(self, names: Sequence[str]) -> None:
        self._users.subtract(names)
