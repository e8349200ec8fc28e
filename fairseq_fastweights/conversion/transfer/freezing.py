"""Keeps weights frozen until the training loss stops improving (Choi 2024, Sec. 3.1)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

_KEY = "loss_improvement"


class LossImprovement:
    """Decides when the training loss has stopped improving.

    The loss is averaged over intervals of updates. Improvement is over, for good, after `patience` successive intervals
    whose averages are not below (1 - threshold) times that of the interval before.

    Args:
        threshold: between 0 and 1.
        patience: number of intervals.
        interval: length of an interval, in updates.

    Its whole state is `state`, in plain numbers.
    """

    def __init__(self, threshold: float, patience: int, interval: int) -> None:
        self.threshold, self.patience, self.interval = threshold, patience, interval
        self.state: dict[str, Any] = {"updates": 0, "loss": 0.0, "weight": 0.0}
        self.state |= {"average": None, "stalled": 0, "over": False}

    @property
    def over(self) -> bool:
        return bool(self.state["over"])

    def add(self, loss: float, weight: float) -> None:
        """Adds an update: the sum of its losses, and their number."""
        state = self.state
        state["updates"] += 1
        state["loss"] += loss
        state["weight"] += weight
        if state["updates"] % self.interval:
            return
        average = state["loss"] / max(state["weight"], 1)
        before, state["average"] = state["average"], average
        state["loss"] = state["weight"] = 0.0
        if self.over or before is None:
            return
        improvement = (before - average) / before if before else 0.0
        # A loss of NaN has not improved.
        state["stalled"] = 0 if improvement >= self.threshold else state["stalled"] + 1
        logger.info(
            "training loss of the last %d updates: %.4f, better by %.2f%%", self.interval, average, 100 * improvement
        )
        if state["stalled"] >= self.patience:
            state["over"] = True


class Freezing:
    """Freezes parameters until improvement is over.

    The optimizer has the parameters from the start, so they keep `requires_grad`. Their gradients are removed after
    each backward pass, before gradient norms are computed; neither momentum nor weight decay changes a parameter
    without a gradient.

    The state of `improvement` is kept in the optimizer's first group of parameters, because fairseq's trainer saves the
    state of a task but never restores it. `--reset-optimizer` resets it, together with the number of updates.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], improvement: LossImprovement) -> None:
        self._parameters = list(parameters)
        self._improvement = improvement

    @property
    def frozen(self) -> bool:
        return not self._improvement.over

    def attach(self, optimizer: Any) -> None:
        """Takes the state from a restored optimizer, or puts it there. To be called before each update."""
        # torch saves and restores all entries of a group.
        group = optimizer.optimizer.param_groups[0]
        state = group.setdefault(_KEY, self._improvement.state)
        if state is self._improvement.state:
            return
        self._improvement.state = state
        now = "are still frozen after" if self.frozen else "were unfrozen after"
        logger.info("resumed: weights %s %d updates", now, state["updates"])

    def drop_gradients(self, optimizer: Any) -> None:
        """Removes the gradients of frozen parameters."""
        if not self.frozen:
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
        """Adds the losses of an update, of all processes."""
        if not self.frozen:
            return
        outputs = list(logging_outputs)
        loss = sum(float(output["loss"]) for output in outputs)
        self._improvement.add(loss, sum(float(output["sample_size"]) for output in outputs))
        if not self.frozen:
            number = sum(parameter.numel() for parameter in self._parameters)
            logger.info(
                "%s frozen parameters are trained from now on: after %d updates the loss has stopped improving by "
                "%g%% every %d updates",
                f"{number:,}",
                self._improvement.state["updates"],
                100 * self._improvement.threshold,
                self._improvement.interval,
            )


def freeze_for_good(parameters: Iterable[nn.Parameter]) -> None:
    """Turns gradients of parameters off."""
    for parameter in parameters:
        parameter.requires_grad_(False)
