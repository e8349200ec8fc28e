"""Contexts that are carried over and contexts that slide: what is trained on, and what the perplexities mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import QUIET, SMALL_MODEL, TASK, binarise, command, count_tokens, evaluate, train
from tests.tasks.two_processes import train_in_two

CARRY = ["--carry-over-state"]
NO_POSITIONS = ["--no-token-positional-embeddings"]
ADAPTIVE = """--adaptive-input --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --criterion adaptive_loss
    --ddp-backend legacy_ddp""".split()
FAIRSEQS_TASK = [*TASK[:2], "--task", "language_modeling"]


def one_pass(data: Path, checkpoint: Path, split: str = "test") -> float:
    """The base-2 loss of the whole split read at once, computed without any of the readers under test."""
    from fairseq import checkpoint_utils
    from fairseq.data import data_utils

    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    model.eval()
    lines = data_utils.load_indexed_dataset(str(data / split), task.dictionary)
    text = torch.cat([lines[i] for i in range(len(lines))])[None]
    inputs = torch.cat([torch.full((1, 1), task.dictionary.eos()), text[:, :-1]], dim=1)
    text[text >= len(task.target_dictionary)] = task.target_dictionary.unk()
    with torch.no_grad():
        scores = model.get_normalized_probs(model(inputs), log_probs=True, sample={"target": text})
    return -scores.gather(-1, text[..., None]).mean().item() / torch.tensor(2.0).log().item()


def test_carried_over_state_makes_the_segments_length_irrelevant(corpus, model):
    checkpoint = model(*NO_POSITIONS)
    whole = one_pass(corpus, checkpoint)
    for length in ("1", "512"):
        loss, tokens = evaluate(corpus, checkpoint, *CARRY, "--tokens-per-sample", length)
        assert tokens == count_tokens(corpus, "test")
        # The bound is 1e-4 of the perplexity; float32 sums in another order stay far below it.
        assert 2**loss == pytest.approx(2**whole, rel=2e-5)
    apart, _ = evaluate(corpus, checkpoint, "--tokens-per-sample", "64")
    assert abs(2**apart / 2**whole - 1) > 1e-3, "the corpus must be one where carrying matters"


@pytest.mark.parametrize(
    "flags", [[], pytest.param(ADAPTIVE, marks=pytest.mark.slow)], ids=["positions", "adaptive softmax"]
)
def test_sliding_windows_give_fairseqs_perplexity(corpus, model, flags):
    reading = "--tokens-per-sample 16 --context-window 11 --batch-size 8".split()
    ours, tokens = evaluate(corpus, model(*flags), *reading)
    theirs, as_many = evaluate(corpus, model(*flags), *reading, task=FAIRSEQS_TASK)
    assert tokens == as_many == count_tokens(corpus, "test")
    assert 2**ours == pytest.approx(2**theirs, rel=1e-5)


def test_a_window_as_long_as_the_text_is_one_pass(corpus, model):
    checkpoint = model(*NO_POSITIONS)
    loss, _ = evaluate(corpus, checkpoint, "--tokens-per-sample", "800", "--context-window", "799")
    assert 2**loss == pytest.approx(2 ** one_pass(corpus, checkpoint), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made_with", "flags"),
    [
        (["--arch", "transformer_lm"], []),
        (["--max-target-positions", "32"], ["--add-bos-token"]),
        (["--max-target-positions", "32"], ["--shorten-method", "truncate"]),
        (["--output-dictionary-size", "30"], ["--output-dictionary-size", "30"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_sliding_windows_of_what_fairseq_changes_are_fairseqs(corpus, model, made_with, flags):
    """Another model, <s> before each sample, lines cut to a sample's length, words that the output dictionary lacks."""
    reading = ["--tokens-per-sample", "16", "--context-window", "8", "--batch-size", "8", *flags]
    ours, theirs = (evaluate(corpus, model(*made_with), *reading, task=task) for task in (TASK, FAIRSEQS_TASK))
    assert ours == theirs


def test_a_smaller_output_dictionary_leaves_carried_inputs_alone(corpus, model):
    smaller = ["--output-dictionary-size", "30"]
    checkpoint = model(*NO_POSITIONS, *smaller)
    loss, tokens = evaluate(corpus, checkpoint, *CARRY, *smaller, "--tokens-per-sample", "64")
    assert tokens == count_tokens(corpus, "test")
    assert 2**loss == pytest.approx(2 ** one_pass(corpus, checkpoint), rel=2e-5)


@pytest.mark.slow
def test_data_of_every_kind_is_read_alike(corpus, model, tmp_path):
    for path in corpus.parent.glob("*.txt"):
        shutil.copy(path, tmp_path)
    lazy = binarise(tmp_path, "--dataset-impl", "lazy", "--srcdict", str(corpus / "dict.txt"))
    for flags in (CARRY, ["--context-window", "48"]):
        reading = [model(*NO_POSITIONS), *flags, "--tokens-per-sample", "64"]
        wanted = evaluate(corpus, *reading)
        for kind in ("cached", "lazy"):
            assert evaluate(lazy, *reading, "--dataset-impl", kind) == wanted
    logs = [train(data, tmp_path / "new", *CARRY, "--no-save", "--max-epoch", "1") for data in (corpus, lazy)]
    assert epoch_losses(logs[0], "train_loss") == epoch_losses(logs[1], "train_loss")


def epoch_losses(log: str, key: str) -> list[float]:
    rows = [json.loads(line[line.index("{") :]) for line in log.splitlines() if f'"{key}"' in line]
    return [float(row[key]) for row in rows]


def frozen(checkpoint: Path) -> list[str]:
    """Two epochs of training that change nothing, so that the losses of training are those of one fixed model."""
    start = ["--finetune-from-model", str(checkpoint), "--lr", "0", "--max-epoch", "2", "--max-update", "0"]
    return [*start, *NO_POSITIONS, *CARRY, "--no-save"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--update-freq 3 --checkpoint-activations --tokens-per-sample 9 --batch-size-valid 2 --validate-interval 1",
        "--num-workers 2 --validate-interval-updates 9",
    ],
)
def test_training_and_validation_read_whole_streams(corpus, model, tmp_path, flags):
    # --batch-size streams, each from its start to its end: what fairseq-eval-lm computes for as many streams.
    wanted = {}
    for split, streams in (("train", "4"), ("valid", "2" if "--batch-size-valid" in flags else "4")):
        reading = [*CARRY, "--tokens-per-sample", "23", "--batch-size", streams, "--gen-subset", split]
        wanted[split], _ = evaluate(corpus, model(*NO_POSITIONS), *reading)
    log = command(
        "train",
        *[str(corpus), *TASK, *SMALL_MODEL, *QUIET, "--optimizer", "adam", "--save-dir", str(tmp_path)],
        *["--tokens-per-sample", "16", "--batch-size", "4", *frozen(model(*NO_POSITIONS)), *flags.split()],
    )
    trained, valid = epoch_losses(log, "train_loss"), epoch_losses(log, "valid_loss")
    assert len(trained) == 2 and len(valid) >= 2
    # The log has three decimals. A lost or mixed-up state moves the loss by more: see the test below.
    assert trained == pytest.approx([wanted["train"]] * 2, abs=6e-4)
    assert valid == pytest.approx([wanted["valid"]] * len(valid), abs=6e-4)


def test_the_losses_above_would_show_a_state_that_is_not_carried(corpus, model):
    flags = ["--tokens-per-sample", "16", "--batch-size", "4", "--gen-subset", "train"]
    carried, _ = evaluate(corpus, model(*NO_POSITIONS), *CARRY, *flags)
    fresh, _ = evaluate(corpus, model(*NO_POSITIONS), *flags)
    assert abs(carried - fresh) > 6e-3


@pytest.mark.slow
def test_two_processes_share_the_streams(corpus, model, tmp_path):
    reading = [*CARRY, "--tokens-per-sample", "23", "--batch-size", "8"]
    wanted = [
        evaluate(corpus, model(*NO_POSITIONS), *reading, "--gen-subset", split)[0] for split in ("train", "valid")
    ]
    log = train_in_two(corpus, tmp_path, *frozen(model(*NO_POSITIONS)), "--validate-interval-updates", "7")
    trained, valid = epoch_losses(log, "train_loss"), epoch_losses(log, "valid_loss")
    assert trained == pytest.approx([wanted[0]] * 2, abs=6e-4)
    assert len(valid) > 2 and valid == pytest.approx([wanted[1]] * len(valid), abs=6e-4)


@pytest.mark.slow
def test_a_run_that_is_taken_up_at_an_epochs_end_goes_on_as_if_it_had_not_stopped(corpus, tmp_path):
    flags = [*NO_POSITIONS, *CARRY, "--max-update", "0", "--lr", "0.001", "--tokens-per-sample", "64"]
    whole = train(corpus, tmp_path / "whole", *flags, "--max-epoch", "2")
    first = train(corpus, tmp_path / "parts", *flags, "--max-epoch", "1")
    second = train(corpus, tmp_path / "parts", *flags, "--max-epoch", "2")
    parts = epoch_losses(first, "train_loss") + epoch_losses(second, "train_loss")
    assert parts == epoch_losses(whole, "train_loss")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


@pytest.mark.slow
def test_a_run_that_is_taken_up_in_mid_epoch_has_the_states_there(corpus, tmp_path):
    flags = [*NO_POSITIONS, *CARRY, "--lr", "0.001", "--update-freq", "2", "--num-workers", "1"]
    train(corpus, tmp_path / "whole", *flags, "--max-update", "8")
    train(corpus, tmp_path / "parts", *flags, "--max-update", "5")
    extra = torch.load(tmp_path / "parts" / "checkpoint_last.pt", weights_only=True)["extra_state"]
    states = extra["train_iterator"]["carried_states"]["states"]
    assert len(states) == 2 and all(x.shape[0] == 4 and x.abs().sum() > 0 for layer in states for x in layer.values())
    log = train(corpus, tmp_path / "parts", *flags, "--max-update", "8")
    assert "start empty" not in log
    whole, parts = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)["model"] for name in ("whole", "parts")
    )
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())


def test_a_run_that_is_taken_up_with_another_batch_size_starts_empty(corpus, tmp_path):
    flags = [*NO_POSITIONS, *CARRY]
    train(corpus, tmp_path, *flags, "--max-update", "3")
    log = train(corpus, tmp_path, *flags, "--max-update", "5", "--batch-size", "3")
    assert "the checkpoint's states are left out" in log and "start empty" in log


@pytest.mark.parametrize(
    ("flags", "concerns"),
    [
        (["--update-rule", "delta"], []),
        (["--update-rule", "sum"], ["the normaliser of attention normalisation grows"]),
        (["--mixers", "mamba,sum:2", "--feature-map", "favor"], ["the normaliser of attention normalisation grows"]),
        (["--update-rule", "delta", "--feature-map", "favor"], ["FAVOR+ draws new features for every training batch"]),
    ],
)
def test_memories_whose_states_should_not_be_carried_are_told(corpus, tmp_path, flags, concerns):
    log = train(corpus, tmp_path, *CARRY, *flags, "--max-update", "1", "--no-save")
    told = [
        line.removeprefix("carry_over_state: ") for line in log.splitlines() if line.startswith("carry_over_state: ")
    ]
    assert len(told) == len(concerns) and all(map(str.startswith, told, concerns))
