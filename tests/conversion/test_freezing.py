"""Transferred weights stay as they are: for good, or until the training loss has stopped to improve."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_fastweights.conversion.freezing import Freezing, LossImprovement
from tests.conftest import train
from tests.tasks.conftest import train_in_two

HARD = "--decoder-normalize-before --update-rule decay --feature-dim 4 --weight-decay 0.1 --clip-norm 0.05".split()


def run(improvement: LossImprovement, losses: list[float]) -> int | None:
    """The update, from 1, with which improvement was over."""
    for update, loss in enumerate(losses, start=1):
        improvement.add(loss, 1)
        if improvement.over:
            return update
    return None


@pytest.mark.parametrize(
    ("threshold", "patience", "interval", "losses", "over_at"),
    [
        # 10 -> 9.8 is 2 %, 9.8 -> 9.751 is half a percent.
        (0.01, 1, 1, [10, 9.8, 9.751], 3),
        (0.004, 1, 1, [10, 9.8, 9.751], None),
        # The first interval has nothing to be compared with.
        (0.5, 1, 1, [10], None),
        (0.5, 1, 1, [10, 9], 2),
        (0.5, 1, 3, [10, 10, 10, 9, 9], None),
        (0.5, 1, 3, [10, 10, 10, 9, 9, 9], 6),
        # Averages: 10 and 8 are 9, 9 and 9 are 9.
        (0.01, 1, 2, [10, 8, 9, 9], 4),
        # Two in a row; one that improves starts the count again.
        (0.01, 2, 1, [10, 10, 10], 3),
        (0.01, 2, 1, [10, 10, 5, 5, 4, 4, 4], 7),
        (0.01, 3, 1, [10, 10, 10, 5, 5, 5, 5], 7),
        # Worse is not better, and no number is not either.
        (0.01, 1, 1, [10, 12], 2),
        (0.01, 1, 1, [10, math.nan], 2),
        (0.01, 1, 1, [0, 0], 2),
        # Exactly as much as asked for is enough.
        (0.5, 1, 1, [8, 4, 2, 1], None),
    ],
)
def test_improvement_is_over_when_it_has_been_small_for_long_enough(threshold, patience, interval, losses, over_at):
    improvement = LossImprovement(threshold, patience, interval)
    assert run(improvement, losses) == over_at
    run(improvement, [5] * interval + [1] * interval)
    assert improvement.over or over_at is None  # for good
    # A state goes on where another was left.
    first, second = (LossImprovement(threshold, patience, interval) for _ in range(2))
    run(first, losses[:-1])
    second.state = dict(first.state)
    assert run(second, losses[-1:]) == (over_at and 1)


def test_losses_are_weighted_by_what_they_are_of():
    improvement = LossImprovement(0.01, 1, 2)
    for loss, weight in ((30.0, 10), (3.0, 2)):
        improvement.add(loss, weight)
    assert improvement.state["average"] == pytest.approx(33 / 12)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_frozen_parameter_does_not_move_until_improvement_is_over(kind, decay):
    frozen, free = (torch.nn.Parameter(torch.tensor([2.0])) for _ in range(2))
    optimizer = SimpleNamespace(optimizer=kind([free, frozen], lr=0.1, weight_decay=decay))
    freezing, moved = Freezing([frozen], LossImprovement(0.01, 1, 2)), []
    for update in range(5):
        freezing.attach(optimizer)
        if update == 3:  # its state lies in the optimizer and comes back with it
            freezing = Freezing([frozen], LossImprovement(0.01, 1, 2))
            freezing.attach(optimizer)
        optimizer.optimizer.zero_grad()
        (frozen * free).sum().backward()
        freezing.drop_gradients(optimizer)
        optimizer.optimizer.step()
        freezing.observe([{"loss": 3.0, "sample_size": 2}, {"loss": 3.0, "sample_size": 2}])
        moved.append(frozen.item() != 2.0)
    assert moved == [False] * 4 + [True] and free.item() != 2.0


def weights(file: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint's model consists of; the buffers that fairseq never fills hold anything."""
    state = torch.load(file, weights_only=True)["model"]
    return {name: x for name, x in state.items() if not name.endswith("_float_tensor")}


def assert_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], parts: str, moved: bool) -> None:
    for part in parts.split():
        assert {not torch.equal(x, after[name]) for name, x in before.items() if part in name} == {moved}, part


FREEZE = ["--freeze", "embeddings,feed-forward"]
# No loss falls by nine tenths: improvement is over after two intervals.
UNFREEZE = [*FREEZE, *"--unfreeze-threshold 0.9 --unfreeze-interval 3".split()]
WAYS = {
    "for good": ("", torch.float32),
    "bfloat16": ("--bf16", torch.bfloat16),
    "float16": ("--fp16 --fp16-no-flatten-grads", torch.float16),
    "memory-efficient float16": ("--memory-efficient-fp16", torch.float16),
    "gradient descent": ("--optimizer sgd --momentum 0.9 --checkpoint-activations", torch.float32),
    "automatic mixed precision": ("--amp", torch.float32),
    "two processes": ("--lr 0.01 --update-freq 2 --disable-validation", torch.float32),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way != "for good")) for way in WAYS])
def test_what_is_frozen_stays_equal_to_the_bit(corpus, trained, tmp_path, way):
    flags, dtype = WAYS[way]
    flags = [*HARD, "--transfer-from", str(trained), *(FREEZE if way == "for good" else UNFREEZE), *flags.split()]
    # fairseq stops where the norms of the gradients of two processes differ.
    in_turn = train_in_two if way == "two processes" else train
    log = in_turn(corpus, tmp_path, *flags, "--max-update", "7", "--save-interval-updates", "1")
    # What the source holds is rounded to half precision.
    start = {name: x.to(dtype) if x.is_floating_point() else x for name, x in weights(trained / "model.pt").items()}
    files = {int(file.stem.rsplit("_", 1)[1]): file for file in tmp_path.glob("checkpoint_*_*.pt")}
    frozen, last = weights(files[6]), weights(files[7])
    assert_moved(start, frozen, "embed_tokens .fc1.weight .fc2. final_layer_norm", False)
    assert_moved(start, frozen, "out_proj.weight", True)
    # With the sixth update the loss has stopped to improve.
    assert_moved(frozen, last, "embed_tokens .fc1.weight", way != "for good")
    assert ("are trained from here on: after 6 updates the loss has stopped" in log) == (way != "for good")


@pytest.mark.slow
def test_frozen_weights_do_not_count_in_the_gradients_norm(corpus, trained, tmp_path):
    flags = [*HARD[:5], "--transfer-from", str(trained), "--freeze", "all", "--max-update", "3", "--no-save"]
    held = ["--unfreeze-threshold", "0.01", "--unfreeze-interval", "50"]
    norms = [re.findall(r'"gnorm": "([^"]+)"', train(corpus, tmp_path, *flags, *more)) for more in ([], held)]
    assert norms[0] == norms[1] and len(norms[0]) >= 3


@pytest.mark.slow
def test_a_run_that_is_taken_up_goes_on_as_if_it_had_not_stopped(corpus, trained, tmp_path):
    flags = [*HARD, "--transfer-from", str(trained), *UNFREEZE, "--max-update", "9"]
    assert "after 6 updates the loss has stopped" in train(corpus, tmp_path, *flags, "--save-interval-updates", "1")
    for stopped_after, said in ((4, "are still frozen after 4"), (6, "were unfrozen after 6")):
        folder = tmp_path / f"{stopped_after}"
        folder.mkdir()
        shutil.copy(tmp_path / f"checkpoint_1_{stopped_after}.pt", folder / "checkpoint_last.pt")
        log = train(corpus, folder, *flags)
        assert ("after 6 updates the loss has stopped" in log) == (stopped_after < 6)
        assert f"taken up again: weights {said} updates" in log
        a, b = (weights(path / "checkpoint_last.pt") for path in (tmp_path, folder))
        assert all(torch.equal(x, b[name]) for name, x in a.items())
