"""Transferred weights stay as they are: for good, or until the training loss has stopped to improve."""

import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from fairseq_fastweights.conversion.transfer.freezing import Freezing
from tests.conftest import train
from tests.tasks.conftest import train_in_two, weights

HARD = "--decoder-normalize-before --update-rule decay --feature-dim 4 --weight-decay 0.1 --clip-norm 0.05".split()


def run(freezing: Freezing, losses: list[float], first: int = 1) -> int | None:
    """The update with which improvement was over. The n-th has n samples; `losses` are of a sample."""
    for update, loss in enumerate(losses, start=first):
        freezing.observe([{"loss": update * loss, "sample_size": update}])
        if freezing.state["over"]:
            return update
    return None


@pytest.mark.parametrize(
    ("threshold", "patience", "interval", "losses", "over_at"),
    [
        # 10 -> 9.8 is 2 %, 9.8 -> 9.751 is half a percent.
        (0.01, 1, 1, [10, 9.8, 9.751], 3),
        (0.004, 1, 1, [10, 9.8, 9.751], None),
        # The first interval has nothing to be compared with.
        (0.5, 1, 1, [10, 9], 2),
        (0.5, 1, 3, [10, 10, 10, 9, 9], None),
        (0.5, 1, 3, [10, 10, 10, 9, 9, 9], 6),
        # Averages of samples: 8.67 is better than 8.6 by less than 1 %, 8.67 than 8.57 by more.
        (0.01, 1, 2, [10, 8, 8.6, 8.6], 4),
        (0.01, 1, 2, [10, 8, 8.8, 8.4], None),
        # Several in a row; one that improves starts the count again.
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
    freezing, first, second = (Freezing([], threshold, patience, interval) for _ in range(3))
    assert run(freezing, losses) == over_at
    run(freezing, [5] * interval + [1] * interval)
    assert freezing.state["over"] or over_at is None  # for good
    # A state goes on where another was left.
    run(first, losses[:-1])
    second.state = dict(first.state)
    assert run(second, losses[-1:], first=len(losses)) == over_at


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_frozen_parameter_does_not_move_until_improvement_is_over(kind, decay):
    frozen, free = (torch.nn.Parameter(torch.tensor([2.0])) for _ in range(2))
    optimizer = SimpleNamespace(optimizer=kind([free, frozen], lr=0.1, weight_decay=decay))
    moved = []
    for update in range(5):
        if update in (0, 3):  # its state lies in the optimizer and comes back with it
            freezing = Freezing([frozen], 0.01, 1, 2)
        freezing.attach(optimizer)
        optimizer.optimizer.zero_grad()
        (frozen * free).sum().backward()
        freezing.drop_gradients(optimizer)
        optimizer.optimizer.step()
        freezing.observe([{"loss": 3.0, "sample_size": 2}, {"loss": 3.0, "sample_size": 2}])
        moved.append(frozen.item() != 2.0)
    assert moved == [False] * 4 + [True] and free.item() != 2.0


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
    (flags, dtype), thaws = WAYS[way], way != "for good"
    flags = [*HARD, "--transfer-from", str(trained), *(UNFREEZE if thaws else FREEZE), *flags.split()]
    # fairseq stops where the norms of the gradients of two processes differ.
    in_turn = train_in_two if way == "two processes" else train
    log = in_turn(corpus, tmp_path, *flags, "--max-update", "7", "--save-interval-updates", "1")
    files = {int(file.stem.rsplit("_", 1)[1]): file for file in tmp_path.glob("checkpoint_*_*.pt")}
    source, frozen, last = (weights(file) for file in (trained / "model.pt", files[6], files[7]))
    # The base model's weights are rounded to half precision.
    start = {name: x.to(dtype) if x.is_floating_point() else x for name, x in source.items()}
    for before, after, parts, moved in (
        (start, frozen, "embed_tokens .fc1.weight .fc2. final_layer_norm", False),
        (start, frozen, "out_proj.weight", True),
        # With the sixth update the loss has stopped to improve.
        (frozen, last, "embed_tokens .fc1.weight", thaws),
    ):
        for part in parts.split():
            assert {not torch.equal(x, after[name]) for name, x in before.items() if part in name} == {moved}, part
    assert ("are trained from now on: after 6 updates the loss has stopped" in log) == thaws


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
    whole = weights(tmp_path / "checkpoint_last.pt")
    for stopped_after, said in ((4, "are still frozen after 4"), (6, "were unfrozen after 6")):
        folder = tmp_path / f"{stopped_after}"
        folder.mkdir()
        shutil.copy(tmp_path / f"checkpoint_1_{stopped_after}.pt", folder / "checkpoint_last.pt")
        log = train(corpus, folder, *flags)
        assert ("after 6 updates the loss has stopped" in log) == (stopped_after < 6)
        assert f"resumed: weights {said} updates" in log
        parts = weights(folder / "checkpoint_last.pt")
        assert all(torch.equal(x, parts[name]) for name, x in whole.items())
