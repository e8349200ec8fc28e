"""A run that was interrupted and taken up is, bit for bit, the run that was not."""

import math
import shutil

import pytest
import torch
from fairseq.data.iterators import CountingIterator, GroupedIterator
from faults import differences, trained

from tests.conftest import train
from tests.tasks.conftest import losses, slow, train_in_two

CARRY = ["--no-token-positional-embeddings", "--carry-over-state", "--lr", "0.001"]

HALF = "--fp16 --fp16-scale-window 3 --fp16-init-scale"
WAYS = {
    "adam": "",
    "amsgrad, plateau": "--lr-scheduler reduce_lr_on_plateau --clip-norm 0.1",
    "adam, warming up": "--lr-scheduler inverse_sqrt --warmup-updates 3 --warmup-init-lr 0 --weight-decay 0.1",
    "adam, cosine": "--lr-scheduler cosine --lr-period-updates 3 --update-freq 2 --reset-state-probability 0.3",
    "adamax": "--optimizer adamax",
    "adagrad": "--optimizer adagrad",
    "adadelta": "--optimizer adadelta --lr 1",
    "sgd": "--optimizer sgd --momentum 0.9",
    "nag": "--optimizer nag",
    "adafactor": "--optimizer adafactor --scale-parameter",
    "dropout, shuffled": "--dropout 0.1 --decoder-layerdrop 0.3 without",
    "streams, from empty states": "--text-streams 8 --update-freq 2 without",
    "workers": "--num-workers 2 without",
    "documents, batches read ahead": "--separate-documents --update-freq 2 --num-workers 1",
    "moving average": "--store-ema --ema-decay 0.9",
    "rarer moving average": "--store-ema --ema-decay 0.9 --ema-update-freq 3 --ema-fp32",
    "fp16": f"{HALF} 4",
    "fp16, overflow": f"{HALF} 1048576 --fp16-scale-tolerance 0.1",
    "fp16, little memory": f"{HALF} 4 --memory-efficient-fp16",
    "bf16": "--bf16",
}
FAST = {"adam", "fp16"}


@pytest.mark.parametrize("way", [way if way in FAST else slow(way) for way in WAYS])
def test_nothing_is_lost_when_a_run_is_taken_up(our_fairseq, corpus, tmp_path, way):
    flags, without, _ = WAYS[way].partition(" without")
    flags = [*([] if without else CARRY), *"--no-epoch-checkpoints --decoder-layers 1".split(), *flags.split()]
    train(corpus, tmp_path / "whole", *flags, *"--max-update 5 --save-interval-updates 2".split())
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole" / "checkpoint_1_2.pt").rename(tmp_path / "parts" / "checkpoint_last.pt")
    train(corpus, tmp_path / "parts", *flags, "--max-update", "5")
    found = differences(trained(tmp_path / "whole"), trained(tmp_path / "parts"))
    assert not found, found


LEFT = [(0, 7, 3), (1, 4, 4), (3, 10, 2), (5, 10, 4), (6, 10, 4), (9, 10, 3)]


@pytest.mark.parametrize(("done", "batches", "chunk"), LEFT)
@pytest.mark.parametrize("whole_updates", [False, True])
def test_another_update_frequency_reads_all_that_is_left_of_an_epoch(our_fairseq, done, batches, chunk, whole_updates):
    left = CountingIterator(range(done, batches), start=done, total=batches)
    updates = GroupedIterator(left, chunk, skip_remainder_batch=whole_updates)
    found = [updates.__next__() for _ in iter(updates.has_next, False)]
    read = (batches - done) // chunk * chunk if whole_updates else batches - done
    assert [x for update in found for x in update] == list(range(done, done + read))
    assert all(len(update) == chunk for update in found[: -1 if not whole_updates else None])
    assert not left.has_next()  # nothing is left for the next epoch


@pytest.mark.slow
def test_two_processes_go_on_with_the_states_of_both(corpus, tmp_path):
    def run(folder: str, updates: int, *flags: str) -> str:
        return train_in_two(
            corpus, tmp_path / folder, *CARRY, "--disable-validation", "--max-update", str(updates), *flags
        )

    run("whole", 8)
    run("parts", 5)
    for name in ("one", "fewer"):
        shutil.copytree(tmp_path / "parts", tmp_path / name)
    log = run("parts", 8)
    assert "start empty" not in log and "is divided among" not in log
    whole = trained(tmp_path / "whole")
    assert not differences(whole, trained(tmp_path / "parts"))
    # By one process: the same 8 streams, whose gradients are added up in another order.
    log = train(corpus, tmp_path / "one", *CARRY, "--batch-size", "8", "--max-update", "8")
    assert "is divided among" not in log
    for name, x in trained(tmp_path / "one")["model"].items():
        assert torch.allclose(x, whole["model"][name], atol=1e-5), name
    log = train(corpus, tmp_path / "fewer", *CARRY, "--batch-size", "3", "--max-epoch", "1", "--max-update", "0")
    assert "the text of 8 streams is divided among 3: 0 continues 0, 1 continues 2, 2 continues 5, with" in log
    assert "start empty" not in log and all(map(math.isfinite, losses(log, "train_loss")))
