"""Carried states and sliding windows: which contexts training reads, and which perplexity evaluation gives."""

import math
from unittest.mock import patch

import pytest
import torch
from fairseq.sequence_scorer import SequenceScorer

from tests.conftest import QUIET, SMALL_MODEL, TASK, command, count_tokens, evaluate, train
from tests.tasks.conftest import loss_alone, losses, slow, train_in_two

CARRY = ["--carry-over-state"]
NO_POSITIONS = ["--no-token-positional-embeddings"]
SMALLER = ["--output-dictionary-size", "30"]
ADAPTIVE = """--adaptive-input --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --criterion adaptive_loss
    --ddp-backend legacy_ddp""".split()


@pytest.mark.parametrize(
    ("made_with", "flags"),
    [
        ([], [*CARRY, "--tokens-per-sample", "1"]),
        ([], [*CARRY, "--tokens-per-sample", "512", "--num-workers", "1"]),
        ([], ["--tokens-per-sample", "800", "--context-window", "799"]),
        (SMALLER, [*CARRY, *SMALLER, "--tokens-per-sample", "64"]),
    ],
    ids=["carried, 1", "carried, 512", "window", "smaller output dictionary"],
)
def test_contexts_that_are_the_whole_text_give_the_perplexity_of_one_pass(corpus, model, made_with, flags):
    checkpoint = model(*NO_POSITIONS, *made_with)
    loss, tokens = evaluate(corpus, checkpoint, *flags)
    assert tokens == count_tokens(corpus, "test")
    whole = 2 ** loss_alone(corpus, checkpoint)
    # 1e-4 of the perplexity are asked for; float32 sums in another order stay far below it.
    assert 2**loss == pytest.approx(whole, rel=2e-5)
    apart, _ = evaluate(corpus, checkpoint, *made_with, "--tokens-per-sample", "64")
    assert abs(2**apart / whole - 1) > 1e-3, "the corpus must be one where carrying matters"


@pytest.mark.parametrize(
    ("made_with", "flags"),
    [
        ([], []),
        slow(ADAPTIVE, []),
        # Settings that change fairseq's samples: another model, <s> before each, lines cut to a length, fewer words.
        slow(["--arch", "transformer_lm"], []),
        slow(["--max-target-positions", "32"], ["--add-bos-token"]),
        slow(["--max-target-positions", "32"], ["--shorten-method", "truncate"]),
        slow(SMALLER, SMALLER),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_sliding_windows_give_fairseqs_perplexity(corpus, model, made_with, flags):
    reading = [*"--tokens-per-sample 16 --context-window 11 --batch-size 8".split(), *flags]
    ours, tokens = evaluate(corpus, model(*made_with), *reading)
    fairseqs_task = [*TASK[:2], "--task", "language_modeling"]
    theirs, as_many = evaluate(corpus, model(*made_with), *reading, task=fairseqs_task)
    assert tokens == as_many and 2**ours == pytest.approx(2**theirs, rel=1e-5)


def test_several_checkpoints_are_one_model_with_their_mean_probabilities(our_fairseq, corpus, model, tmp_path):
    """With a state that is carried, and in a sliding window."""
    train(corpus, tmp_path, *NO_POSITIONS, "--max-update", "2")
    first, other, original = model(*NO_POSITIONS), tmp_path / "checkpoint_last.pt", SequenceScorer.generate

    def scores(path, *flags):
        found = []

        def keep(*arguments, **named):
            hypotheses = original(*arguments, **named)
            found.extend(hypothesis[0]["positional_scores"] for hypothesis in hypotheses)
            return hypotheses

        with patch.object(SequenceScorer, "generate", keep):
            evaluate(corpus, path, "--batch-size", "8", "--tokens-per-sample", "16", *flags)
        return torch.cat(found)

    for flags in (CARRY, ["--context-window", "9"]):
        one, two, both = (scores(path, *flags) for path in (first, other, f"{first}:{other}"))
        torch.testing.assert_close(both, torch.logaddexp(one, two) - math.log(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--update-freq 3 --checkpoint-activations --tokens-per-sample 9 --batch-size-valid 2 --validate-interval 1",
        "--validate-interval-updates 9 --update-freq 2 --separate-documents",
        "--validate-interval-updates 7 --separate-documents in two processes",
        "--validate-interval-updates 7 --reset-state-probability 0.5",
    ],
)
def test_training_and_validation_read_whole_streams(corpus, model, tmp_path, flags):
    flags, _, in_two = flags.partition(" in two")
    checkpoint, streams = model(*NO_POSITIONS), 8 if in_two else 4
    reads = [*CARRY, *["--separate-documents"] * ("--separate-documents" in flags)]
    # --batch-size streams, each from its start to its end, as fairseq-eval-lm scores as many streams.
    wanted = {}
    for split, number in (("train", streams), ("valid", 2 if "--batch-size-valid" in flags else streams)):
        reading = ["--tokens-per-sample", "23", "--batch-size", str(number), "--gen-subset", split]
        wanted[split], _ = evaluate(corpus, checkpoint, *reads, *reading)
    # Two epochs of training that change nothing, so that the losses of training are those of one fixed model.
    start = ["--finetune-from-model", str(checkpoint), "--lr", "0", "--max-epoch", "2", "--max-update", "0"]
    start += [*NO_POSITIONS, *CARRY, "--no-save", *flags.split()]
    if in_two:
        log = train_in_two(corpus, tmp_path, *start)
    else:
        common = [*TASK, *SMALL_MODEL, *QUIET, "--optimizer", "adam", "--save-dir", str(tmp_path)]
        log = command("train", str(corpus), *common, "--tokens-per-sample", "16", "--batch-size", "4", *start)
    trained, valid = losses(log, "train_loss"), losses(log, "valid_loss")
    assert len(trained) == 2 and len(valid) >= 2
    # The log has three decimals. A lost or mixed-up state moves the loss by more.
    resets = "--reset" in flags  # that is, in training
    assert resets or trained == pytest.approx([wanted["train"]] * 2, abs=6e-4)
    assert not resets or all(abs(loss - wanted["train"]) > 3e-3 for loss in trained)
    assert valid == pytest.approx([wanted["valid"]] * len(valid), abs=6e-4)
    fresh, _ = evaluate(corpus, checkpoint, *"--tokens-per-sample 16 --batch-size 4 --gen-subset train".split())
    assert abs(wanted["train"] - fresh) > 6e-3


@pytest.mark.parametrize(
    ("flags", "concerns"),
    [
        (["--mixers", "gated-delta"], []),
        (["--update-rule", "delta"], ["the memory of delta never forgets"]),
        (["--update-rule", "sum"], ["the normaliser of attention normalisation grows"]),
        (["--mixers", "mamba,sum:2", "--feature-map", "favor"], ["the normaliser of attention normalisation grows"]),
        (["--update-rule", "delta", "--feature-map", "favor"], ["FAVOR+ draws new features for every training batch"]),
    ],
)
def test_memories_whose_states_should_not_be_carried_are_told(corpus, tmp_path, flags, concerns):
    log = train(corpus, tmp_path, *CARRY, *flags, "--max-update", "1", "--no-save")
    told = [line.split(": ", 1)[1] for line in log.splitlines() if line.startswith("carry_over_state: ")]
    assert len(told) == len(concerns) and all(map(str.startswith, told, concerns))


@pytest.mark.slow
def test_a_run_taken_up_at_an_epochs_end_goes_on_as_if_never_stopped(corpus, tmp_path):
    flags = [*NO_POSITIONS, *CARRY, "--max-update", "0", "--lr", "0.001", "--tokens-per-sample", "64", "--max-epoch"]
    whole = train(corpus, tmp_path / "whole", *flags, "2")
    parts = [losses(train(corpus, tmp_path / "parts", *flags, epochs), "train_loss") for epochs in "12"]
    assert parts == [[loss] for loss in losses(whole, "train_loss")]
