"""Says in the log how fast a training or an evaluation is, how much is left, and where cores are busy."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

logger = logging.getLogger(__name__)

_FIRST, _LATER = 30.0, 600.0
"""Seconds of a training from the first update to the first line, and between two lines."""
_MINUTE = 60.0


class Pace:
    """Logs the time of an update, and the time that is left, where no terminal shows a progress bar."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None  # after the first update, which sets up more than others
        self._next = 0.0

    def note(self, cfg: Any, trainer: Any, epoch_itr: Any) -> None:
        """Takes note of an update; logs a line if it is time for one."""
        now, updates = time.monotonic(), trainer.get_num_updates()
        # Fewer updates than before: another training in the same process.
        if self._began is None or updates < self._began[1]:
            self._began, self._next = (now, updates), now + _FIRST
        began, before = self._began
        if now < self._next or updates == before or not trainer.is_data_parallel_master or sys.stderr.isatty():
            return
        self._next = now + _LATER
        seconds = (now - began) / (updates - before)
        left = _updates_left(cfg, trainer, epoch_itr)
        rest = "" if math.isinf(left) else f", about {_duration(left * seconds)} left for {math.ceil(left):,} updates"
        logger.info(f"{updates:,} updates, {seconds:.2g} s each{rest}")


def _updates_left(cfg: Any, trainer: Any, epoch_itr: Any) -> float:
    """Updates until --max-update or --max-epoch ends the training; infinity if neither does."""
    options = cfg.optimization
    left = (options.max_update or math.inf) - trainer.get_num_updates()
    if options.max_epoch:
        batches = (options.max_epoch - epoch_itr.epoch + 1) * len(epoch_itr) - epoch_itr.iterations_in_epoch
        # --update-freq may list one number for each epoch; the last one goes on.
        frequency = options.update_freq[min(epoch_itr.epoch, len(options.update_freq)) - 1]
        left = min(left, batches / frequency)
    return max(left, 0)


def _duration(seconds: float) -> str:
    if seconds < 3600:
        return f"{max(1, round(seconds / 60))} min"
    return f"{seconds / 3600:.1f} h"


def warn_of_busy_cores() -> None:
    """Warns where threads would wait for cores that others use: an update can then take five times as long."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if threads > 1 and load >= cores:
        logger.warning(
            f"other processes use the cores (load {load:.1f} on {cores}), and {threads} threads would wait for one "
            "another: OMP_NUM_THREADS=1 may be several times as fast"
        )


class ReportedBatches:
    """Batches of an evaluation that log every minute how many of them have been used."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        total, start = len(self.batches), time.monotonic()
        told = start
        for used, batch in enumerate(self.batches):
            now = time.monotonic()
            if used and now - told >= _MINUTE:
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
