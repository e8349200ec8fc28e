"""--separate-documents: a packed corpus is trained on and scored as its documents alone are."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fairseq_fastweights.tasks.fast_weight_language_modeling import (
    FastWeightLanguageModelingConfig,
    FastWeightLanguageModelingTask,
)
from tests.conftest import QUIET, TASK, binarise, command, count_tokens, evaluate, train
from tests.tasks.conftest import losses, train_in_two
from tests.tasks.test_contexts import weights

APART = "--separate-documents"
NO_POSITIONS = "--no-token-positional-embeddings"
CARRY = "--carry-over-state"
MMAP = {"dataset_impl": "mmap", "use_plasma_view": False}
HYBRID = "--mixers delta,softmax:2 --rotary-dim 4 --max-target-positions 900".split()


def documents_alone(data: Path, checkpoint: Path, new: int = 10**6, context: int = 0, split: str = "test") -> float:
    """The base-2 loss of a split, each document scored by itself, by none of the readers under test.

    In windows, if `new` says so: of `new` tokens, after as many of the document's before them as fit into `context`.
    """
    from fairseq import checkpoint_utils
    from fairseq.data import data_utils

    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    model.eval()
    lines = data_utils.load_indexed_dataset(str(data / split), task.dictionary)
    documents: list[list[int]] = [[]]
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None and len(before) == 1 and len(line) > 1:
            documents.append([])
        documents[-1] += line.tolist()
    assert len(documents) > 1
    loss = 0.0
    for document in documents:
        text = torch.tensor([task.dictionary.eos(), *document])[None]
        for first in range(0, len(document), new):
            start, end = max(0, first - context), min(first + new, len(document))
            with torch.no_grad():
                logits = model(text[:, start:end])[0][:, first - start :]
            loss -= logits.log_softmax(-1).gather(-1, text[:, first + 1 : end + 1, None]).sum().item()
    return loss / sum(map(len, documents)) / math.log(2)


@pytest.mark.parametrize(
    ("made_with", "flags", "windows"),
    [
        ([NO_POSITIONS], "--tokens-per-sample 900 --sample-break-mode complete", {}),
        ([NO_POSITIONS], f"{CARRY} --tokens-per-sample 37 --num-workers 2", {}),
        ([NO_POSITIONS], "--tokens-per-sample 16 --context-window 11 --batch-size 8", {"new": 5, "context": 11}),
        (HYBRID, "--tokens-per-sample 900", {}),
        pytest.param(
            HYBRID, "--tokens-per-sample 16 --context-window 8", {"new": 8, "context": 8}, marks=pytest.mark.slow
        ),
    ],
    ids=["lines", "streams", "windows", "positions", "windows with positions"],
)
def test_a_packed_corpus_is_scored_as_its_documents_alone(corpus, model, made_with, flags, windows):
    checkpoint = model(*made_with)
    loss, tokens = evaluate(corpus, checkpoint, APART, *flags.split())
    assert tokens == count_tokens(corpus, "test")
    # Sums of float32 in another order.
    assert 2**loss == pytest.approx(2 ** documents_alone(corpus, checkpoint, **windows), rel=2e-5)
    packed, _ = evaluate(corpus, checkpoint, *flags.split())
    assert abs(2**packed / 2**loss - 1) > 2e-4, "the corpus must be one where it matters"


@pytest.mark.slow
@pytest.mark.parametrize("contexts", ["--sample-break-mode none", CARRY])
def test_references_are_scored_so(corpus, model, contexts, capsys):
    flags = [APART, *contexts.split(), "--batch-size", "8", "--tokens-per-sample", "16"]
    loss, _ = evaluate(corpus, model(NO_POSITIONS), *flags)
    flags += ["--path", str(model(NO_POSITIONS)), "--gen-subset", "test"]
    command("generate", str(corpus), *TASK, *QUIET, *flags, "--score-reference")
    scores = re.findall(r"^P-\d+\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    values = [float(x) for row in scores for x in row.split()]
    assert -sum(values) / len(values) == pytest.approx(loss, abs=1e-3)


def frozen(checkpoint: Path) -> list[str]:
    """An epoch of training that changes nothing, so that its loss is that of the checkpoint."""
    start = ["--finetune-from-model", str(checkpoint), "--lr", "0", "--max-epoch", "1", "--max-update", "0"]
    return [*start, NO_POSITIONS, APART, "--no-save"]


@pytest.mark.parametrize(
    ("contexts", "flags"),
    [([CARRY], ["--update-freq", "2"]), pytest.param([], ["--num-workers", "2"], marks=pytest.mark.slow)],
)
def test_training_reads_what_evaluation_does(corpus, model, tmp_path, contexts, flags):
    checkpoint = model(NO_POSITIONS)
    reading = [*contexts, "--tokens-per-sample", "16", "--batch-size", "4", "--gen-subset", "train"]
    wanted, _ = evaluate(corpus, checkpoint, APART, *reading)
    log = train(corpus, tmp_path, *frozen(checkpoint), *contexts, *flags)
    # The log has three decimals; what would be lost if documents were not told apart is more.
    assert losses(log, "train_loss") == pytest.approx([wanted], abs=6e-4)
    assert abs(evaluate(corpus, checkpoint, *reading)[0] - wanted) > 2e-3


@pytest.mark.slow
def test_two_processes_read_it_too(corpus, model, tmp_path):
    reading = [APART, CARRY, "--tokens-per-sample", "16", "--batch-size", "8", "--gen-subset", "train"]
    wanted, _ = evaluate(corpus, model(NO_POSITIONS), *reading)
    log = train_in_two(corpus, tmp_path, *frozen(model(NO_POSITIONS)), CARRY)
    assert losses(log, "train_loss") == pytest.approx([wanted], abs=6e-4)


@pytest.mark.slow
def test_a_run_that_is_taken_up_in_mid_epoch_goes_on_as_if_it_had_not_stopped(corpus, tmp_path):
    flags = [CARRY, NO_POSITIONS, APART, "--lr", "0.001", "--update-freq", "2", "--num-workers", "1"]
    train(corpus, tmp_path / "whole", *flags, "--max-update", "8")
    train(corpus, tmp_path / "parts", *flags, "--max-update", "5")
    train(corpus, tmp_path / "parts", *flags, "--max-update", "8")
    whole, parts = (weights(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())


def batches(corpus: Path, **settings: object) -> list[dict]:
    """The batches of a first epoch of training."""
    settings = {"tokens_per_sample": 16, **MMAP, **settings}
    task = FastWeightLanguageModelingTask.setup_task(FastWeightLanguageModelingConfig(data=str(corpus), **settings))
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--arch transformer_lm",
            "separate_documents is set, but TransformerLanguageModel does not tell documents apart",
        ),
        ("--mixers linformer,delta:2", r"documents cannot be kept apart in layers 1 \(linformer\).* of sum, gated,"),
    ],
)
def test_options_that_cannot_work_are_named(corpus, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        train(corpus, tmp_path / "new", APART, *flags.split())
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sample_break_mode", "complete_doc"),
        ("sample_break_mode", "eos"),
        ("shorten_method", "truncate"),
        ("add_bos_token", True),
        ("self_target", True),
        ("past_target", True),
    ],
)
def test_segments_are_filled_with_text_as_it_stands(corpus, name, value):
    settings = FastWeightLanguageModelingConfig(data=str(corpus), separate_documents=True, **{name: value})
    with pytest.raises(ValueError, match=f"{name} is {value}; with separate_documents it must be"):
        FastWeightLanguageModelingTask.setup_task(settings)


def test_a_split_without_empty_lines_is_named(tmp_path):
    (tmp_path / "train.txt").write_text("a b c\n\nd e\n" * 9)
    (tmp_path / "valid.txt").write_text("a b c\nd e\n" * 9)
    with pytest.raises(ValueError, match="split 'valid' has no empty line"):
        train(binarise(tmp_path), tmp_path / "new", APART, "--max-update", "1")
    assert not list(tmp_path.rglob("*.pt"))


def test_windows_and_generation_that_cannot_be_are_named(corpus, model):
    reading = [APART, "--tokens-per-sample", "16"]
    with pytest.raises(ValueError, match=r"context_window is 8 and sample_break_mode complete; .* must be none"):
        evaluate(corpus, model(NO_POSITIONS), *reading, "--context-window", "8", "--sample-break-mode", "complete")
    settings = FastWeightLanguageModelingConfig(data=str(corpus), separate_documents=True, **MMAP)
    task = FastWeightLanguageModelingTask.setup_task(settings)
    task.load_dataset("test")
    with pytest.raises(ValueError, match="separate_documents is set, but generation continues a sample as one text"):
        task.build_generator([], Namespace())
