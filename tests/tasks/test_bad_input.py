"""Mistakes of a user: a clear error, and nothing written over."""

import re
import shutil
import traceback
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.data.indexed_dataset import make_builder

from fairseq_fastweights.data.corpus import TokenCorpus
from fairseq_fastweights.ops import libraries
from fairseq_fastweights.tasks.fast_weight_language_modeling import (
    FastWeightLanguageModelingConfig,
    FastWeightLanguageModelingTask,
)
from fairseq_fastweights.tasks.save_dir import LOCK
from tests.conftest import binarise, evaluate, train
from tests.conversion.test_bad_input import Harmful

MISFIT, NEW = r"checkpoint_last\.pt does not fit the model", "another model needs another --save-dir"
CARRY, APART = "--carry-over-state", "--separate-documents"


# The model's options: tests/models/test_architectures.py.
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--feature-map dpfp --feature-dim 31", "feature_dim is 31.*32"),
        ("--fast-weight-backend native", "'native' was asked for: the cpu kernels are lost"),
        (f"{CARRY} --softmax-attention-layers 2", r"carry_over_state is set.*layers 2 \(softmax\)"),
        ("--skip-remainder-batch --update-freq 500", "skip_remainder_batch is set, which leaves nothing of an epoch o"),
        (f"{CARRY} --batch-size 5000", "batch size times the number of processes is 5000"),
        (f"{CARRY} --arch transformer_lm", "TransformerLanguageModel has no state to carry"),
        (f"{CARRY} --reset-state-probability 1.5", r"reset_state_probability is 1\.5; it must be from 0 to 1"),
        ("--reset-state-probability 0.1", r"is 0\.1; without carry_over_state it must be 0: every segment starts in a"),
        ("--text-streams 10", "text_streams is 10; it must be a multiple of batch_size times the number of proc.*, 4"),
        (f"{CARRY} --text-streams 8", "text_streams is 8; with carry_over_state it must be 0: the streams are"),
        (f"{APART} --arch transformer_lm", "separate_documents is set, but TransformerLanguageModel does not tell doc"),
        (f"{APART} --mixers linformer,delta:2", r"kept apart in layers 1 \(linformer\).* of sum, gated,"),
    ],
)
def test_options_that_cannot_work_are_named(corpus, tmp_path, monkeypatch, flags, message):
    if "native" in flags:
        monkeypatch.setattr(libraries, "load", lambda device: f"the {device} kernels are lost")
    with pytest.raises((ValueError, RuntimeError), match=re.compile(message, re.DOTALL)):
        train(corpus, tmp_path / "new", *flags.split())
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    ("valid", "message"), [("", "split 'valid' holds no tokens"), ("a\n" * 9, "split 'valid' has no empty line")]
)
def test_splits_without_text_or_documents_are_named(tmp_path, valid, message):
    for name, text in {"train": "a b c\n\nd e\n" * 9, "valid": valid or "a\n"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    data = binarise(tmp_path)
    if not valid:  # of a text that is empty, which another fairseq-preprocess takes
        make_builder(str(data / "valid.bin"), "mmap", vocab_size=9).finalize(str(data / "valid.idx"))
    with pytest.raises(ValueError, match=message):
        train(data, tmp_path / "new", APART, "--max-update", "1")
    assert not list(tmp_path.rglob("*.pt"))


def task_with(corpus: Path, **settings: object) -> FastWeightLanguageModelingTask:
    return FastWeightLanguageModelingTask.setup_task(FastWeightLanguageModelingConfig(data=str(corpus), **settings))


def test_segments_are_filled_with_text_as_it_stands(corpus):
    both = [("sample_break_mode", "eos"), ("shorten_method", "truncate")]
    both += [(name, True) for name in ("add_bos_token", "self_target", "past_target")]
    carried = [("sample_break_mode", "complete"), ("pad_to_fixed_length", True), ("pad_to_fixed_bsz", True)]
    apart = [("sample_break_mode", "complete_doc")]
    streams = {"carry_over_state": both + carried, "text_streams": both + carried}
    for option, settings in {**streams, "separate_documents": both + apart}.items():
        for name, value in settings:
            with pytest.raises(ValueError, match=f"{name} is {value}; with {option} it must be (none|False): "):
                task_with(corpus, **{option: True, name: value})


def test_text_streams_are_of_the_training_text_alone(corpus):
    task = task_with(corpus, text_streams=8, train_subset="train", dataset_impl="mmap", use_plasma_view=False)
    for split in ("train", "valid"):
        task.load_dataset(split)
    streams = task.get_batch_iterator(task.dataset("train"), max_sentences=4).next_epoch_itr(shuffle=False)
    first, second = (next(streams) for _ in range(2))
    assert first["id"].tolist() == [0, 1, 2, 3] and second["id"].tolist() == [4, 5, 6, 7]
    assert "continues" not in first["net_input"]
    assert not isinstance(task.dataset("valid"), TokenCorpus)
    with pytest.raises(ValueError, match="batch_size is not set; with text_streams"):
        task.get_batch_iterator(task.dataset("train"), max_tokens=64)


def test_which_segments_start_empty_in_training_depends_on_the_seed(corpus):
    settings = {"carry_over_state": True, "reset_state_probability": 0.5, "tokens_per_sample": 8}
    task = task_with(corpus, **settings, dataset_impl="mmap", use_plasma_view=False)
    task.load_dataset("train")

    def continued(seed: int) -> list[list[bool]]:
        batches = task.get_batch_iterator(task.dataset("train"), max_sentences=4, seed=seed)
        return [batch["net_input"]["continues"].tolist() for batch in batches.next_epoch_itr(shuffle=False)]

    assert continued(1) == continued(1) != continued(2)


def test_streams_need_a_batch_size_and_generation_continues_no_streams(corpus):
    why = {"carry_over_state": "generation starts from empty states", "separate_documents": "continues a sample as one"}
    for option in why:
        task = task_with(corpus, dataset_impl="mmap", use_plasma_view=False, **{option: True})
        task.load_dataset("test")
        for args in (Namespace(), Namespace(score_reference=False)):
            with pytest.raises(ValueError, match=f"{option} is set, but .*{why[option]}"):
                task.build_generator([], args)
        if option == "carry_over_state":
            # Their text is in memory; the end of worker processes would keep training waiting.
            assert task.get_batch_iterator(task.dataset("test"), max_sentences=2, num_workers=2).num_workers == 0
            with pytest.raises(ValueError, match="batch_size is not set; with carry_over_state"):
                task.get_batch_iterator(task.dataset("test"), max_tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokens-per-sample 17 --context-window 16", "tokens_per_sample is 17 .*16 positions"),
        (f"{CARRY} --tokens-per-sample 17", "tokens_per_sample is 17, but the model has 16 positions"),
        ("--tokens-per-sample 8 --context-window 8", "tokens_per_sample without the context window is 0"),
        (f"{CARRY} --tokens-per-sample 8 --context-window 4", "context_window is 4; with carry_over_state"),
        ("--tokens-per-sample 8 --gen-subset nowhere", "no split 'nowhere'"),
        ("--text-streams 2", "text_streams is 2; in evaluation it must be 0"),
        (f"{CARRY} --reset-state-probability 0.5", r"reset_state_probability is 0\.5; in evaluation it must be 0"),
        (f"{CARRY} --softmax", r"carry_over_state is set, but .* layers 2 \(softmax\)"),
        (f"{APART} --sample-break-mode complete --context-window 8", "is 8 and sample_break_mode complete; .*be none"),
    ],
)
def test_contexts_that_cannot_be_are_named(corpus, model, flags, message):
    checkpoint = model("--softmax-attention-layers", "2", "--max-update", "1") if "softmax" in flags else model()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate(corpus, checkpoint, *"--tokens-per-sample 16".split(), *flags.replace("--softmax", "").split())


def printed(error: pytest.ExceptionInfo[Exception]) -> str:
    """The traceback that Python prints: fairseq wraps a model's error about a checkpoint in another one."""
    return "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--update-rule gated", f"{MISFIT}: update_rule is 'delta' in the checkpoint and 'gated' in the model; {NEW}"),
        (
            "--dropout 0.3 --decoder-layers 3",
            f"{MISFIT}: decoder_layers is 2 in the checkpoint and 3 in the model; {NEW}",
        ),
        ("--decoder-attention-heads 4", f"{MISFIT}: decoder_attention_heads is 2 in .* and 4 in the model; {NEW}"),
        (
            "--decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16",
            rf"{MISFIT}: (decoder_(embed|output|input)_dim is 32 in [\w ]+ 16 in the model; ){{3}}{NEW}",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_kept(corpus, model, tmp_path, flags, message):
    kept = Path(shutil.copy(model(), tmp_path))
    before = kept.read_bytes()
    with pytest.raises(Exception) as error:
        train(corpus, tmp_path, *flags.split(), "--max-update", "50")
    assert re.search(message, printed(error))
    assert kept.read_bytes() == before and {path.name for path in tmp_path.iterdir()} == {kept.name, LOCK}


# fairseq-train starts anew where there is no checkpoint.
CASES = [(name, kind) for name in ("eval_lm", "train") for kind in ("truncated", "empty", "hostile", "missing")][:-1]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_bad_checkpoint_stops_everything_and_runs_nothing(corpus, model, tmp_path, monkeypatch, caplog, name, kind):
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "checkpoint_last.pt"
    if kind == "hostile":
        torch.save({"model": Harmful(), "cfg": None, "args": None}, bad)
    elif kind != "missing":
        bad.write_bytes(model().read_bytes()[:-2000] if kind == "truncated" else b"")
    before = [(path, path.read_bytes()) for path in tmp_path.iterdir()]
    with pytest.raises((Exception, SystemExit)) as error:
        train(corpus, tmp_path) if name == "train" else evaluate(corpus, bad, "--tokens-per-sample", "16")
    assert str(bad) in printed(error) + caplog.text
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir() if path.name != LOCK] == before
