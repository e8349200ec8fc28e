"""Weights that stay as they are until the training loss stops to improve (Choi 2024, Sec. 3.1)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

_KEY = "loss_improvement"


class LossImprovement:
    """Tells when the training loss has stopped to improve.

    The loss is averaged over each interval of updates. When, for some intervals in a row, the average is less than a
    part `threshold` below that of the interval before, improvement is over, for good.

    Args:
        threshold: between 0 and 1.
        patience: for how many intervals in a row.
        interval: in updates.

    `state` is all that it remembers, in plain numbers.
    """

    def __init__(self, threshold: float, patience: int, interval: int) -> None:
        self.threshold, self.patience, self.interval = threshold, patience, interval
        self.state: dict[str, Any] = {
            "updates": 0,
            "loss": 0.0,
            "weight": 0.0,
            "average": None,
            "stalled": 0,
            "over": False,
        }

    @property
    def over(self) -> bool:
        return bool(self.state["over"])

    def add(self, loss: float, weight: float) -> None:
        """Takes note of an update: the sum of its losses, and over how many."""
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
        # A loss that is no number has not improved.
        state["stalled"] = 0 if improvement >= self.threshold else state["stalled"] + 1
        logger.info(
            "training loss of the last %d updates: %.4f, better by %.2f%%", self.interval, average, 100 * improvement
        )
        if state["stalled"] >= self.patience:
            state["over"] = True


class Freezing:
    """Keeps parameters as they are until improvement is over, then lets them be trained.

    The optimizer knows the parameters from the start, so they keep `requires_grad`. What holds them is that their
    gradients are thrown away after each backward pass, before norms are taken, and are missing when the optimizer
    steps: neither momentum nor weight decay moves a parameter without a gradient.

    fairseq's trainer saves the state of a task and never restores it. The state of the optimizer it does restore, and
    with `--reset-optimizer` it leaves out both the number of updates and this: so the state of `improvement` is kept
    there, in the first group of parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], improvement: LossImprovement) -> None:
        self._parameters = list(parameters)
        self._improvement = improvement

    @property
    def frozen(self) -> bool:
        return not self._improvement.over

    def attach(self, optimizer: Any) -> None:
        """Takes up the state that an optimizer was restored with, or gives it one. To be called before each update."""
        group = optimizer.optimizer.param_groups[0]
        state = group.setdefault(_KEY, self._improvement.state)
        if state is self._improvement.state:
            return
        self._improvement.state = state
        said = "are still frozen after" if self.frozen else "were unfrozen after"
        logger.info("taken up again: weights %s %d updates", said, state["updates"])

    def drop_gradients(self, optimizer: Any) -> None:
        """Throws away the gradients of what is frozen."""
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
        """Takes note of an update's losses, those of all processes."""
        if not self.frozen:
            return
        outputs = list(logging_outputs)
        loss = sum(float(output["loss"]) for output in outputs)
        self._improvement.add(loss, sum(float(output["sample_size"]) for output in outputs))
        if not self.frozen:
            number = sum(parameter.numel() for parameter in self._parameters)
            logger.info(
                "%s frozen parameters are trained from here on: after %d updates the loss has stopped to improve by "
                "%g%% every %d updates",
                f"{number:,}",
                self._improvement.state["updates"],
                100 * self._improvement.threshold,
                self._improvement.interval,
            )


def freeze_for_good(parameters: Iterable[nn.Parameter]) -> None:
    """Takes parameters out of training."""
    for parameter in parameters:
        parameter.requires_grad_(False)
