"""One point of the grid: a model is trained on sequences that are drawn as it learns, and evaluated on others."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch

from synthetic.models import KEY_DIM, MODELS, Retriever, embedding_size, retrieval_loss
from synthetic.retrieval import all_queries, draw_queries, draw_sequences, sequence_length

BATCH = 32
LEARNING_RATE = 1e-3
"""Adam's default, as are its other settings."""
EVALUATE_EVERY = 100
"""Steps. The paper leaves it open; the authors' published code has the same."""
EVALUATED = 20
"""Sequences of an evaluation. They are drawn anew for each."""
TARGET = 0.001
"""Training ends with an evaluation loss below it."""
PROGRESS = 0.99
"""An evaluation loss is progress if it is below this share of the last one that was."""
PATIENCE = 1_000
"""Steps without progress after which training ends."""
MAX_STEPS = 20_000
"""Training ends here in any case, which the paper does not say."""
UNRECORDED = 3
"""Steps on a GPU before one is recorded: libraries and the optimiser set themselves up in the first."""
VERSION = 1
"""To be raised with any change of the code that changes results by more than rounding does."""
AT_ONCE = 2**22
"""About how many coefficients an evaluation computes at a time."""


@dataclass(frozen=True)
class Point:
    """A model, a size, and all else that its result depends on."""

    setting: int
    model: str  # a name of `MODELS[setting]`
    size: int  # S
    seed: int = 1  # of the initial weights and all that is drawn
    max_steps: int = MAX_STEPS  # where training ends if nothing else ends it
    device: str = "cpu"  # or "cuda", whose generator draws other numbers
    evaluate_length: str = ""  # "S": Setting 2 is evaluated on S pairs, as by the authors' program; "": as trained

    @property
    def key(self) -> str:
        """A digest of the point, its model and how points are trained and evaluated."""
        protocol = [VERSION, BATCH, LEARNING_RATE, EVALUATE_EVERY, EVALUATED, TARGET, PROGRESS, PATIENCE, KEY_DIM]
        model = asdict(MODELS[self.setting][self.model])
        del model["title"]
        point = asdict(self)
        if not self.evaluate_length:
            del point["evaluate_length"]  # which older lines do not have
        parts = [point, model, protocol, embedding_size(self.size)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        return f"setting {self.setting}, {self.model_title}, S = {self.size}"

    @property
    def model_title(self) -> str:
        evaluated = f", evaluated on {self.evaluate_length} pairs" if self.evaluate_length else ""
        return MODELS[self.setting][self.model].title + evaluated

    @property
    def work(self) -> float:
        """About how much there is to compute, in units of its own, to put points in order and to estimate times."""
        return 10_000 + sequence_length(self.setting, self.size) * _features(self.setting, self.model)


@cache
def _features(setting: int, model: str) -> int:
    return MODELS[setting][model].build().features


class StopRule:
    """When training ends.

    `best_loss`, `best_step`: of the lowest evaluation loss so far.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.best_loss = math.inf
        self.best_step = 0
        self._progress_loss = math.inf
        self._progress_step = 0

    def judge(self, step: int, loss: float) -> str | None:
        """Takes an evaluation's result; returns why training ends with it, None if it goes on."""
        if not math.isfinite(loss):
            return "not a number"
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, step
        if loss < PROGRESS * self._progress_loss:
            self._progress_loss, self._progress_step = loss, step
        if loss < TARGET:
            return "solved"
        if step - self._progress_step >= PATIENCE:
            return "no progress"
        return "limit" if step >= self.max_steps else None


def train_point(point: Point, report: Callable[[int, float], None] = lambda step, loss: None) -> dict[str, Any]:
    """Trains and evaluates until `StopRule` ends it.

    `report`: is told of each evaluation: the step and the loss. Returns the content of the point's line: its key, the
    point, the lowest loss and its step, how many steps there were and why they ended, the loss of each evaluation, and
    how long it took where.
    """
    started = time.monotonic()
    torch.manual_seed(point.seed)
    device = torch.device(point.device)
    retriever = Retriever(MODELS[point.setting][point.model], point.size).to(device)
    on_gpu = device.type == "cuda"
    # A CUDA graph needs the optimiser's count of steps on the GPU (`capturable`).
    optimizer = torch.optim.Adam(retriever.parameters(), lr=LEARNING_RATE, fused=True, capturable=on_gpu)
    rule = StopRule(point.max_steps)
    curve = []
    stopped, step = None, 0
    train_once: Callable[[], None] = partial(train_step, retriever, optimizer, point)
    if on_gpu:
        train_once = recorded(train_once)
    while stopped is None:
        step += 1
        train_once()
        if step % EVALUATE_EVERY == 0 or step == point.max_steps:
            loss = evaluate(retriever, point)
            curve.append([step, round_off(loss)])
            stopped = rule.judge(step, loss)
            report(step, loss)
    return {
        "key": point.key,
        "point": asdict(point),
        "best_loss": round_off(rule.best_loss),
        "best_step": rule.best_step,
        "steps": step,
        "stopped": stopped,
        "curve": curve,
        "seconds": round(time.monotonic() - started, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def recorded(call: Callable[[], None]) -> Callable[[], None]:
    """`call`, whose first calls are made one by one and later ones by replaying a CUDA graph of it.

    A step is hundreds of small kernels, thousands with a capped memory, that take longer to launch than to run.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    calls = 0

    def next_call() -> None:
        nonlocal calls
        calls += 1
        # A capture needs calls on a side stream before it, by torch's rules for CUDA graphs.
        if calls <= UNRECORDED:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if calls == UNRECORDED + 1:
            with torch.cuda.graph(graph, stream=stream):
                call()
        graph.replay()

    return next_call


def train_step(retriever: Retriever, optimizer: torch.optim.Optimizer, point: Point) -> None:
    """One batch of sequences, with one query each."""
    retriever.train()
    sequences = draw_sequences(point.setting, point.size, BATCH, point.device)
    queries, targets = draw_queries(sequences)
    optimizer.zero_grad()
    retrieval_loss(retriever(sequences, queries), targets).mean().backward()
    optimizer.step()


@torch.no_grad()
def evaluate(retriever: Retriever, point: Point) -> float:
    """The mean loss over all possible queries of `EVALUATED` new sequences."""
    retriever.eval()
    length = point.size if point.evaluate_length else sequence_length(point.setting, point.size)
    # A query for each of S keys reads all pairs: S x length coefficients a sequence.
    batch = max(1, min(EVALUATED, AT_ONCE // (point.size * length)))
    total = count = 0.0
    for first in range(0, EVALUATED, batch):
        sequences = draw_sequences(point.setting, point.size, min(batch, EVALUATED - first), point.device, length)
        queries, targets, possible = all_queries(sequences)
        losses = retrieval_loss(retriever(sequences, queries), targets)
        total += losses[possible].sum().item()
        count += possible.sum().item()
    return total / count


def round_off(loss: float) -> float | None:
    """Six digits; None where there is no number, for which JSON has no word."""
    return float(f"{loss:.6g}") if math.isfinite(loss) else None
