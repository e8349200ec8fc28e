"""Transferred weights stay as they are: for good, or until the training loss has stopped to improve."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fairseq_fastweights.models.fast_weight_lm
import fairseq_fastweights.tasks.fast_weight_language_modeling  # noqa: F401
from fairseq_fastweights.conversion.freezing import Freezing, LossImprovement
from tests.conftest import train
from tests.tasks.conftest import train_in_two

MODEL = ["--decoder-normalize-before", "--update-rule", "decay", "--feature-dim", "4"]
HARD = ["--weight-decay", "0.1", "--clip-norm", "0.05"]


def run(improvement: LossImprovement, losses: list[float], weight: float = 1.0) -> int | None:
    """The update, from 1, with which improvement was over."""
    for update, loss in enumerate(losses, start=1):
        improvement.add(loss * weight, weight)
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
        (0.01, 1, 1, [10, float("nan")], 2),
        (0.01, 1, 1, [0, 0], 2),
        # Exactly as much as asked for is enough.
        (0.5, 1, 1, [8, 4, 2, 1], None),
    ],
)
def test_improvement_is_over_when_it_has_been_small_for_long_enough(threshold, patience, interval, losses, over_at):
    assert run(LossImprovement(threshold, patience, interval), losses) == over_at


def test_losses_are_weighted_by_what_they_are_of():
    improvement = LossImprovement(0.01, 1, 2)
    for loss, weight in ((30.0, 10), (3.0, 2)):
        improvement.add(loss, weight)
    assert improvement.state["average"] == pytest.approx(33 / 12)


def test_improvement_that_is_over_stays_so():
    improvement = LossImprovement(0.01, 1, 1)
    assert run(improvement, [10, 10]) == 2
    run(improvement, [5, 1])
    assert improvement.over


def test_a_state_goes_on_where_another_was_left():
    whole, first, second = (LossImprovement(0.01, 2, 3) for _ in range(3))
    losses = [9, 8, 7, 6, 6, 6, 6, 6, 6.1, 6, 6, 6]
    run(first, losses[:7])
    second.state = dict(first.state)
    assert run(second, losses[7:]) == run(whole, losses) - 7
    assert second.state == whole.state


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_frozen_parameter_does_not_move_and_then_trains_as_if_it_had_just_come(kind, decay):
    frozen, free = (torch.nn.Parameter(torch.tensor([2.0])) for _ in range(2))
    torch_optimizer = kind([free, frozen], lr=0.1, weight_decay=decay)
    optimizer = SimpleNamespace(optimizer=torch_optimizer)
    improvement = LossImprovement(0.01, 1, 2)
    freezing = Freezing([frozen], improvement)
    for _ in range(4):
        freezing.attach(optimizer)
        torch_optimizer.zero_grad()
        (frozen * free).sum().backward()
        freezing.drop_gradients(optimizer)
        torch_optimizer.step()
        freezing.observe([{"loss": 3.0, "sample_size": 2}, {"loss": 3.0, "sample_size": 2}])
    assert frozen.item() == 2.0 and free.item() != 2.0 and not freezing.frozen
    value = torch.nn.Parameter(frozen.detach().clone())
    alone = kind([value], lr=0.1, weight_decay=decay)
    (value * free.item()).sum().backward()
    torch_optimizer.zero_grad()
    (frozen * free).sum().backward()
    freezing.drop_gradients(optimizer)
    for each in (alone, torch_optimizer):
        each.step()
    assert frozen.item() == value.item() != 2.0


def test_the_state_lies_in_the_optimizer_and_comes_back_with_it(tmp_path):
    def make() -> tuple[Freezing, SimpleNamespace]:
        weight = torch.nn.Parameter(torch.ones(1))
        return Freezing([weight], LossImprovement(0.01, 1, 2)), SimpleNamespace(optimizer=torch.optim.Adam([weight]))

    (saved, optimizer), (loaded, other) = make(), make()
    saved.attach(optimizer)
    for _ in range(3):
        saved.observe([{"loss": 3.0, "sample_size": 2}])
    torch.save(optimizer.optimizer.state_dict(), tmp_path / "optimizer.pt")
    other.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    loaded.attach(other)
    assert loaded.frozen
    loaded.observe([{"loss": 3.0, "sample_size": 2}])
    assert not loaded.frozen


@pytest.fixture(scope="module")
def source(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Transformer that was trained a little."""
    folder = tmp_path_factory.mktemp("source")
    flags = ["--arch", "transformer_lm", "--decoder-normalize-before", "--max-update", "20"]
    train(corpus, folder, *flags)
    shutil.move(folder / "checkpoint_last.pt", folder / "model.pt")
    shutil.copy(corpus / "dict.txt", folder)
    return folder


def weights(file: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint's model consists of; the buffers that fairseq never fills hold anything."""
    state = torch.load(file, weights_only=True)["model"]
    return {name: x for name, x in state.items() if not name.endswith("_float_tensor")}


def lit(source: Path, groups: str, threshold: str = "0.9", interval: str = "3") -> list[str]:
    """The flags of a run that unfreezes its weights after two intervals, by default: no loss falls by nine tenths."""
    flags = (
        f"--transfer-from {source} --freeze {groups} --unfreeze-threshold {threshold} --unfreeze-interval {interval}"
    )
    return [*MODEL, *flags.split()]


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], part: str) -> set[bool]:
    return {not torch.equal(x, after[name]) for name, x in before.items() if part in name}


def test_what_is_frozen_for_good_stays_equal_to_the_bit(corpus, source, tmp_path):
    flags = [*MODEL, *HARD, "--transfer-from", str(source), "--freeze", "embeddings,feed-forward"]
    train(corpus, tmp_path, *flags)
    before, after = weights(source / "model.pt"), weights(tmp_path / "checkpoint_last.pt")
    for part in ("embed_tokens", ".fc1.", ".fc2.", "final_layer_norm"):
        assert moved(before, after, part) == {False}
    for part in ("out_proj", "self_attn_layer_norm"):
        assert moved(before, after, part) == {True}


def assert_held_and_let_go(source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Of a run that saved each of its seven updates: with the sixth the loss has stopped to improve."""
    # What the source holds is rounded to half precision.
    start = weights(source / "model.pt")
    before = {name: x.to(dtype) if x.is_floating_point() else x for name, x in start.items()}
    files = {int(file.stem.rsplit("_", 1)[1]): file for file in folder.glob("checkpoint_*_*.pt")}
    frozen, trained = weights(files[6]), weights(files[7])
    for part in ("embed_tokens", ".fc1.weight", ".fc2.", "final_layer_norm"):
        assert moved(before, frozen, part) == {False}, part
    assert moved(before, frozen, "out_proj.weight") == {True}
    for part in ("embed_tokens", ".fc1.weight"):
        assert moved(frozen, trained, part) == {True}, part


SEVEN = ["--max-update", "7", "--save-interval-updates", "1"]
WAYS = {
    "bfloat16": (["--bf16"], torch.bfloat16),
    "float16": (["--fp16", "--fp16-no-flatten-grads"], torch.float16),
    "memory-efficient float16": (["--memory-efficient-fp16"], torch.float16),
    "gradient descent": (["--optimizer", "sgd", "--momentum", "0.9", "--checkpoint-activations"], torch.float32),
    "automatic mixed precision": (["--amp"], torch.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "dtype"), WAYS.values(), ids=WAYS)
def test_what_is_frozen_for_a_time_stays_equal_to_the_bit(corpus, source, tmp_path, way, dtype):
    log = train(corpus, tmp_path, *lit(source, "embeddings,feed-forward"), *HARD, *way, *SEVEN)
    assert "are trained from here on: after 6 updates" in log
    assert_held_and_let_go(source, tmp_path, dtype)


@pytest.mark.slow
def test_two_processes_unfreeze_together(corpus, source, tmp_path):
    flags = [*lit(source, "embeddings,feed-forward"), *HARD, *SEVEN, "--lr", "0.01", "--update-freq", "2"]
    # fairseq stops where the norms of the processes' gradients differ.
    log = train_in_two(corpus, tmp_path, *flags, "--disable-validation")
    assert "after 6 updates the loss has stopped" in log
    assert_held_and_let_go(source, tmp_path)


@pytest.mark.slow
def test_frozen_weights_do_not_count_in_the_gradients_norm(corpus, source, tmp_path):
    flags = [*MODEL, "--transfer-from", str(source), "--freeze", "all", "--max-update", "3", "--no-save"]
    good = train(corpus, tmp_path, *flags)
    lit_flags = ["--unfreeze-threshold", "0.01", "--unfreeze-interval", "50"]
    held = train(corpus, tmp_path, *flags, *lit_flags)
    norms = [re.findall(r'"gnorm": "([^"]+)"', log) for log in (good, held)]
    assert norms[0] == norms[1] and len(norms[0]) >= 3


@pytest.mark.slow
def test_a_run_that_is_taken_up_goes_on_as_if_it_had_not_stopped(corpus, source, tmp_path):
    flags = [*lit(source, "embeddings,feed-forward"), *HARD, "--max-update", "9"]
    whole = train(corpus, tmp_path, *flags, "--save-interval-updates", "1")
    assert "after 6 updates the loss has stopped" in whole
    for stopped_after, said in ((4, "still frozen after 4"), (6, "unfrozen after 6")):
        folder = tmp_path / f"{stopped_after}"
        folder.mkdir()
        shutil.copy(tmp_path / f"checkpoint_1_{stopped_after}.pt", folder / "checkpoint_last.pt")
        second = train(corpus, folder, *flags)
        assert ("after 6 updates the loss has stopped" in second) == (stopped_after < 6)
        assert re.search(rf"taken up again: weights (are|were) {said} updates", second)
        a, b = (weights(path / "checkpoint_last.pt") for path in (tmp_path, folder))
        assert all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp16", "fp16 is True; with unfreeze_threshold it must be with fp16_no_flatten_grads"),
        ("--use-bmuf", "use_bmuf is True"),
        ("--zero-sharding os", "zero_sharding is os"),
        ("--ddp-backend slowmo", "ddp_backend is slowmo"),
        ("--tpu", "tpu is True"),
    ],
)
def test_where_weights_cannot_be_held_they_are_not_said_to_be_frozen(corpus, source, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        train(corpus, tmp_path, *lit(source, "all"), *flags.split())
    assert not list(tmp_path.rglob("*.pt"))
