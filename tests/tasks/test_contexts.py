"""Contexts that are carried over and contexts that slide: what is trained on, and what the perplexities mean."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import QUIET, ROOT, SMALL_MODEL, TASK, binarise, command, count_tokens, evaluate, train

CARRY = ["--carry-over-state"]
NO_POSITIONS = ["--no-token-positional-embeddings"]


@pytest.fixture(scope="module")
def models(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that have learned enough for contexts to matter."""
    folder = tmp_path_factory.mktemp("models")
    flags = {
        "delta": NO_POSITIONS,
        "decay": [*NO_POSITIONS, "--update-rule", "decay"],
        "sum": [*NO_POSITIONS, "--update-rule", "sum"],
        "positions": [],
        "softmax": ["--softmax-attention-layers", "all"],
        "adaptive": [
            *["--adaptive-input", "--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20"],
            *["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"],
        ],
    }
    for name, extra in flags.items():
        train(corpus, folder / name, "--max-update", "40", *extra)
    return {name: folder / name / "checkpoint_last.pt" for name in flags}


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


@pytest.mark.parametrize("name", ["delta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("decay", "sum"))])
def test_carried_over_state_makes_the_segments_length_irrelevant(corpus, models, name):
    whole = one_pass(corpus, models[name])
    for length in ("1", "512"):
        loss, tokens = evaluate(corpus, models[name], *CARRY, "--tokens-per-sample", length)
        assert tokens == count_tokens(corpus, "test")
        # The bound is 1e-4 of the perplexity; float32 sums in another order stay far below it.
        assert 2**loss == pytest.approx(2**whole, rel=2e-5)
    apart, _ = evaluate(corpus, models[name], "--tokens-per-sample", "64")
    assert abs(2**apart / 2**whole - 1) > 1e-3, "the corpus must be one where carrying matters"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "context"),
    [
        ("delta", 16, 15),
        ("positions", 16, 11),
        *(pytest.param(x, 16, 11, marks=pytest.mark.slow) for x in ("softmax", "adaptive")),
    ],
)
def test_sliding_windows_give_fairseqs_perplexity(corpus, models, name, length, context):
    flags = ["--tokens-per-sample", str(length), "--context-window", str(context), "--batch-size", "8"]
    ours, tokens = evaluate(corpus, models[name], *flags)
    stock_task = ["--user-dir", TASK[1], "--task", "language_modeling"]
    theirs, as_many = evaluate(corpus, models[name], *flags, task=stock_task)
    assert tokens == as_many == count_tokens(corpus, "test")
    assert 2**ours == pytest.approx(2**theirs, rel=1e-5)


def test_a_window_as_long_as_the_text_is_one_pass(corpus, models):
    loss, _ = evaluate(corpus, models["delta"], "--tokens-per-sample", "800", "--context-window", "799")
    assert 2**loss == pytest.approx(2 ** one_pass(corpus, models["delta"]), rel=2e-5)


@pytest.mark.slow
def test_sliding_takes_fairseqs_models_too(corpus, tmp_path):
    stock = ["transformer_lm" if word == "fast_weight_lm" else word for word in SMALL_MODEL]
    optimizer = "--optimizer adam --lr 0.01 --tokens-per-sample 16 --batch-size 4 --max-update 3".split()
    command("train", str(corpus), *TASK, *stock, *QUIET, *optimizer, "--save-dir", str(tmp_path))
    checkpoint = tmp_path / "checkpoint_last.pt"
    flags = ["--tokens-per-sample", "16", "--context-window", "15", "--batch-size", "8"]
    ours, tokens = evaluate(corpus, checkpoint, *flags)
    theirs, _ = evaluate(corpus, checkpoint, *flags, task=["--task", "language_modeling"])
    assert tokens == count_tokens(corpus, "test")
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "context"),
    [
        (["--add-bos-token", "--max-target-positions", "32"], "15"),
        (["--output-dictionary-size", "30"], "8"),
        (["--shorten-method", "truncate"], "15"),
    ],
    ids=lambda value: value[0],
)
def test_sliding_windows_of_texts_that_fairseq_changes_are_fairseqs(corpus, tmp_path, flags, context):
    """<s> before each sample, words that the output dictionary lacks, and lines cut to the length of a sample."""
    train(corpus, tmp_path, *flags, "--max-update", "5")
    reading = ["--tokens-per-sample", "16", "--context-window", context, "--batch-size", "8", *flags]
    ours = evaluate(corpus, tmp_path / "checkpoint_last.pt", *reading)
    stock_task = ["--user-dir", TASK[1], "--task", "language_modeling"]
    assert ours == evaluate(corpus, tmp_path / "checkpoint_last.pt", *reading, task=stock_task)


@pytest.mark.slow
def test_a_smaller_output_dictionary_leaves_carried_inputs_alone(corpus, tmp_path):
    flags = [*CARRY, "--output-dictionary-size", "30"]
    train(corpus, tmp_path, *NO_POSITIONS, *flags)
    checkpoint = tmp_path / "checkpoint_last.pt"
    loss, tokens = evaluate(corpus, checkpoint, *flags, "--tokens-per-sample", "64")
    assert tokens == count_tokens(corpus, "test")
    assert 2**loss == pytest.approx(2 ** one_pass(corpus, checkpoint), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [CARRY, ["--context-window", "48"]], ids=" ".join)
def test_data_of_every_kind_is_read_alike(corpus, models, tmp_path, flags):
    for path in corpus.parent.glob("*.txt"):
        shutil.copy(path, tmp_path)
    (tmp_path / "dict.txt").write_bytes((corpus / "dict.txt").read_bytes())
    lazy = binarise(tmp_path, "--dataset-impl", "lazy", "--srcdict", str(tmp_path / "dict.txt"))
    wanted = evaluate(corpus, models["delta"], *flags, "--tokens-per-sample", "64")
    for kind in ([], ["--dataset-impl", "cached"], ["--dataset-impl", "lazy"]):
        assert evaluate(lazy, models["delta"], *flags, "--tokens-per-sample", "64", *kind) == wanted
    if flags == CARRY:
        logs = [train(data, tmp_path / "new", *flags, "--no-save", "--max-epoch", "1") for data in (corpus, lazy)]
        assert epoch_losses(logs[0], "train_loss") == epoch_losses(logs[1], "train_loss")


def epoch_losses(log: str, key: str) -> list[float]:
    rows = [json.loads(line[line.index("{") :]) for line in log.splitlines() if f'"{key}"' in line]
    return [float(row[key]) for row in rows]


def frozen(checkpoint: Path) -> list[str]:
    """Two epochs of training that change nothing, so that the losses of training are those of one fixed model."""
    start = ["--finetune-from-model", str(checkpoint), "--lr", "0", "--max-epoch", "2", "--max-update", "0"]
    return [*start, *NO_POSITIONS, *CARRY, "--no-save"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--update-freq", "3", "--checkpoint-activations"],
        pytest.param(["--num-workers", "2", "--validate-interval-updates", "9"], marks=pytest.mark.slow),
        pytest.param(["--tokens-per-sample", "9", "--batch-size-valid", "2"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_training_and_validation_read_whole_streams(corpus, models, tmp_path, flags):
    # --batch-size streams, each from its start to its end: what fairseq-eval-lm computes for as many streams.
    wanted = {}
    for split, streams in (("train", "4"), ("valid", "2" if "--batch-size-valid" in flags else "4")):
        reading = [*CARRY, "--tokens-per-sample", "23", "--batch-size", streams, "--gen-subset", split]
        wanted[split], _ = evaluate(corpus, models["delta"], *reading)
    validation = [] if "--validate-interval-updates" in flags else ["--validate-interval", "1"]
    log = command(
        "train",
        *[str(corpus), *TASK, *SMALL_MODEL, *QUIET, "--optimizer", "adam", "--save-dir", str(tmp_path)],
        *["--tokens-per-sample", "16", "--batch-size", "4", *frozen(models["delta"]), *validation, *flags],
    )
    trained, valid = epoch_losses(log, "train_loss"), epoch_losses(log, "valid_loss")
    assert len(trained) == 2 and len(valid) >= 2
    # The log has three decimals. A lost or mixed-up state moves the loss by more: see the test below.
    assert trained == pytest.approx([wanted["train"]] * 2, abs=6e-4)
    assert valid == pytest.approx([wanted["valid"]] * len(valid), abs=6e-4)


@pytest.mark.slow
def test_the_losses_above_would_show_a_state_that_is_not_carried(corpus, models):
    flags = ["--tokens-per-sample", "16", "--batch-size", "4", "--gen-subset", "train"]
    carried, _ = evaluate(corpus, models["delta"], *CARRY, *flags)
    fresh, _ = evaluate(corpus, models["delta"], *flags)
    assert abs(carried - fresh) > 6e-3


@pytest.mark.slow
def test_two_processes_share_the_streams(corpus, models, tmp_path):
    reading = [*CARRY, "--tokens-per-sample", "23", "--batch-size", "8"]
    wanted = [evaluate(corpus, models["delta"], *reading, "--gen-subset", split)[0] for split in ("train", "valid")]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    start = "import sys; from fairseq_cli.train import cli_main; sys.exit(cli_main())"
    flags = [
        *[str(corpus), *TASK, *SMALL_MODEL, *QUIET, "--optimizer", "adam", "--save-dir", str(tmp_path)],
        *["--tokens-per-sample", "16", "--batch-size", "4", *frozen(models["delta"])],
        *["--validate-interval-updates", "7", "--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo"],
        *["--distributed-world-size", "2", "--distributed-no-spawn"],
        *["--distributed-init-method", f"tcp://localhost:{port}"],
    ]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", start, *flags, "--distributed-rank", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    logs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], logs[0][-3000:]
    trained, valid = epoch_losses(logs[0], "train_loss"), epoch_losses(logs[0], "valid_loss")
    assert trained == pytest.approx([wanted[0]] * 2, abs=6e-4)
    assert len(valid) > 2 and valid == pytest.approx([wanted[1]] * len(valid), abs=6e-4)


@pytest.mark.slow
def test_a_run_that_is_taken_up_at_an_epochs_end_goes_on_as_if_it_had_not_stopped(corpus, tmp_path):
    flags = [*NO_POSITIONS, *CARRY, "--max-update", "0", "--lr", "0.001"]
    whole = train(corpus, tmp_path / "whole", *flags, "--max-epoch", "2")
    first = train(corpus, tmp_path / "parts", *flags, "--max-epoch", "1")
    second = train(corpus, tmp_path / "parts", *flags, "--max-epoch", "2")
    parts = epoch_losses(first, "train_loss") + epoch_losses(second, "train_loss")
    assert parts == epoch_losses(whole, "train_loss")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--update-freq", "2"], ["--num-workers", "1"]], ids=" ".join)
def test_a_run_that_is_taken_up_in_mid_epoch_has_the_states_there(corpus, tmp_path, flags):
    flags = [*NO_POSITIONS, *CARRY, "--lr", "0.001", *flags]
    train(corpus, tmp_path / "whole", *flags, "--max-update", "8")
    train(corpus, tmp_path / "parts", *flags, "--max-update", "5")
    extra = torch.load(tmp_path / "parts" / "checkpoint_last.pt", weights_only=True)["extra_state"]
    states = extra["train_iterator"]["carried_states"]["states"]
    assert len(states) == 2 and all(x.shape[0] == 4 and x.abs().sum() > 0 for layer in states for x in layer.values())
    log = train(corpus, tmp_path / "parts", *flags, "--max-update", "8")
    assert "start empty" not in log
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())


def test_a_run_that_is_taken_up_with_another_batch_size_starts_empty(corpus, tmp_path):
    flags = [*NO_POSITIONS, *CARRY]
    train(corpus, tmp_path, *flags, "--max-update", "3")
    log = train(corpus, tmp_path, *flags, "--max-update", "5", "--batch-size", "3")
    assert "the checkpoint's states are left out" in log and "start empty" in log
