"""Keeps weights frozen until the training loss stops improving (Choi 2024, Sec. 3.1)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

_KEY = "loss_improvement"


class Freezing:
    """Freezes parameters until the training loss has stopped improving.

    The loss is averaged over intervals of updates. Improvement is over, for good, after `patience` successive intervals
    whose averages are not below (1 - threshold) times that of the interval before.

    The optimizer has the parameters from the start, so they keep `requires_grad`. Their gradients are removed after
    each backward pass, before gradient norms are computed; neither momentum nor weight decay changes a parameter
    without a gradient.

    `state`, in plain numbers, is kept in the optimizer's first group of parameters, because fairseq's trainer saves the
    state of a task but never restores it. `--reset-optimizer` resets it, together with the number of updates.

    Args:
        parameters: the frozen ones.
        threshold: between 0 and 1.
        patience: number of intervals.
        interval: length of an interval, in updates.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], threshold: float, patience: int, interval: int) -> None:
        self._parameters = list(parameters)
        self.threshold, self.patience, self.interval = threshold, patience, interval
        self.state: dict[str, Any] = {"updates": 0, "loss": 0.0, "weight": 0.0}
        self.state |= {"average": None, "stalled": 0, "over": False}

    def attach(self, optimizer: Any) -> None:
        """Takes the state from a restored optimizer, or puts it there. To be called before each update."""
        # torch saves and restores all entries of a group.
        state = optimizer.optimizer.param_groups[0].setdefault(_KEY, self.state)
        if state is self.state:
            return
        self.state = state
        now = "were unfrozen after" if state["over"] else "are still frozen after"
        logger.info("resumed: weights %s %d updates", now, state["updates"])

    def drop_gradients(self, optimizer: Any) -> None:
        """Removes the gradients of frozen parameters."""
        if self.state["over"]:
            return
        for parameter in self._parameters:
            parameter.grad = None
        # In half precision the optimizer has a copy of each parameter.
        copies = getattr(optimizer, "fp32_params", None)
        if isinstance(copies, list):
            held = {id(parameter) for parameter in self._parameters}
            for parameter, copy in zip(optimizer.fp16_params, copies, strict=True):
                if id(parameter) in held:
                    copy.grad = None

    def observe(self, logging_outputs: Iterable[dict[str, Any]]) -> None:
        """Adds the losses of an update, of all processes: sums over tokens, and the numbers of tokens."""
        state = self.state
        if state["over"]:
            return
        outputs = list(logging_outputs)
        state["updates"] += 1
        state["loss"] += sum(float(output["loss"]) for output in outputs)
        state["weight"] += sum(float(output["sample_size"]) for output in outputs)
        if state["updates"] % self.interval:
            return
        before, average = state["average"], state["loss"] / max(state["weight"], 1)
        state |= {"average": average, "loss": 0.0, "weight": 0.0}
        if before is None:
            return
        improvement = (before - average) / before if before else 0.0
        # A loss of NaN has not improved.
        state["stalled"] = 0 if improvement >= self.threshold else state["stalled"] + 1
        logger.info(
            "training loss of the last %d updates: %.4f, better by %.2f%%", self.interval, average, 100 * improvement
        )
        if state["stalled"] < self.patience:
            return
        state["over"] = True
        logger.info(
            "%s frozen parameters are trained from now on: after %d updates the loss has stopped improving by %g%% "
            "every %d updates",
            f"{sum(parameter.numel() for parameter in self._parameters):,}",
            state["updates"],
            100 * self.threshold,
            self.interval,
        )
