"""--separate-documents: a packed corpus is trained on and scored as its documents alone are."""

from pathlib import Path

import pytest
import torch

from tests.conftest import count_tokens, evaluate, train
from tests.tasks.conftest import loss_alone, losses, slow
from tests.tasks.test_bad_input import task_with

APART = "--separate-documents"
NO_POSITIONS = "--no-token-positional-embeddings"
CARRY = "--carry-over-state"
HYBRID = "--mixers delta,softmax:2 --rotary-dim 4 --max-target-positions 900".split()


@pytest.mark.parametrize(
    ("made_with", "flags", "windows"),
    [
        ([NO_POSITIONS], "--tokens-per-sample 900 --sample-break-mode complete", {}),
        ([NO_POSITIONS], f"{CARRY} --tokens-per-sample 37 --num-workers 2", {}),
        ([NO_POSITIONS], "--tokens-per-sample 16 --context-window 11 --batch-size 8", {"new": 5, "context": 11}),
        (HYBRID, "--tokens-per-sample 900", {}),
        slow(HYBRID, "--tokens-per-sample 16 --context-window 8", {"new": 8, "context": 8}),
    ],
    ids=["lines", "streams", "windows", "positions", "windows with positions"],
)
def test_a_packed_corpus_is_scored_as_its_documents_alone(corpus, model, made_with, flags, windows):
    checkpoint = model(*made_with)
    loss, tokens = evaluate(corpus, checkpoint, APART, *flags.split())
    assert tokens == count_tokens(corpus, "test")
    # Sums of float32 in another order.
    assert 2**loss == pytest.approx(2 ** loss_alone(corpus, checkpoint, apart=True, **windows), rel=2e-5)
    packed, _ = evaluate(corpus, checkpoint, *flags.split())
    assert abs(2**packed / 2**loss - 1) > 2e-4, "the corpus must be one where it matters"


# With streams: tests/tasks/test_contexts.py.
def test_training_reads_documents_as_evaluation_does(corpus, model, tmp_path):
    checkpoint, reading = model(NO_POSITIONS), "--tokens-per-sample 16 --batch-size 4 --gen-subset train".split()
    wanted, _ = evaluate(corpus, checkpoint, APART, *reading)
    # An epoch of training that changes nothing, so that its loss is that of the checkpoint.
    start = f"--finetune-from-model {checkpoint} --lr 0 --max-epoch 1 --max-update 0 --num-workers 2 --no-save"
    log = train(corpus, tmp_path, *start.split(), NO_POSITIONS, APART)
    # The log has three decimals; without separate documents the loss differs by more.
    assert losses(log, "train_loss") == pytest.approx([wanted], abs=6e-4)
    assert abs(evaluate(corpus, checkpoint, *reading)[0] - wanted) > 2e-3


def batches(corpus: Path, **settings: object) -> list[dict]:
    """The batches of a first epoch of training."""
    task = task_with(corpus, tokens_per_sample=16, dataset_impl="mmap", use_plasma_view=False, **settings)
    task.load_dataset("train")
    reading = task.get_batch_iterator(task.dataset("train"), max_sentences=4, seed=1, max_tokens=999)
    return list(reading.next_epoch_itr())


@pytest.mark.parametrize("settings", [{}, {"carry_over_state": True}], ids=str)
def test_batches_differ_by_where_documents_begin_and_by_nothing_else(corpus, settings):
    plain, apart = batches(corpus, **settings), batches(corpus, **settings, separate_documents=True)
    keys = {"src_tokens", "src_lengths"} | ({"continues"} if settings else set())
    assert len(plain) == len(apart) > 1
    for one, other in zip(plain, apart, strict=True):
        assert set(one["net_input"]) == keys and set(other["net_input"]) == keys | {"starts"}
        assert torch.equal(one["id"], other["id"]) and torch.equal(one["target"], other["target"])
        assert all(torch.equal(one["net_input"][name], other["net_input"][name]) for name in keys)
    assert sum(int(batch["net_input"]["starts"].sum()) for batch in apart) > 5
