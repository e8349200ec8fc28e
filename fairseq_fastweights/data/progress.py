"""Progress lines in the log of a long evaluation, because fairseq shows a progress bar only on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

logger = logging.getLogger(__name__)

SECONDS = 60.0
"""Between two lines."""


class ReportedBatches:
    """Batches that log how many of them have been used, every `seconds`.

    Args:
        batches: an iterable with a length.
        seconds: between two lines.
    """

    def __init__(self, batches: Any, seconds: float = SECONDS) -> None:
        self.batches = batches
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        total, start = len(self.batches), time.monotonic()
        told = start
        for used, batch in enumerate(self.batches):
            now = time.monotonic()
            if used and now - told >= self.seconds:
                told = now
                left = (now - start) / used * (total - used)
                logger.info(f"{used:,} of {total:,} batches evaluated, about {max(1, round(left / 60)):,} min left")
            yield batch


def reported(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that makes batches: they become `ReportedBatches` if fairseq shows no progress bar."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        batches = make(*args, **kwargs)
        return batches if sys.stderr.isatty() else ReportedBatches(batches)

    return made
