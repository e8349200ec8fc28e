"""What a user can get wrong: a clear error, an exit code that is not 0, nothing written over."""

from __future__ import annotations

import re
import shutil
import traceback
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fairseq_fastweights.ops import libraries
from fairseq_fastweights.tasks.fast_weight_language_modeling import (
    FastWeightLanguageModelingConfig,
    FastWeightLanguageModelingTask,
)
from tests.conftest import QUIET, SMALL_MODEL, TASK, binarise, command, evaluate, spawn, train

CARRY = "--carry-over-state"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--update-rule hebb", "invalid choice: 'hebb'.*sum.*gated.*decay.*delta"),
        ("--feature-map cosine", "invalid choice: 'cosine'.*elu.*favor"),
    ],
)
def test_unknown_choices_are_refused_by_the_command_line(corpus, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        train(corpus, tmp_path / "new", *flags.split())
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err, flags=re.DOTALL)
    assert not (tmp_path / "new").exists()


# What the model's options may be is in tests/models/test_architectures.py.
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--feature-map dpfp --feature-dim 31", "feature_dim is 31.*32"),
        (f"{CARRY} --sample-break-mode eos", "sample_break_mode is eos.*must be none"),
        (f"{CARRY} --softmax-attention-layers 2", r"carry_over_state is set.*layers 2 \(softmax\)"),
        (f"{CARRY} --batch-size 5000", "batch size times the number of processes is 5000"),
        (f"{CARRY} --arch transformer_lm", "TransformerLanguageModel has no state to carry"),
    ],
)
def test_options_that_cannot_work_are_named(corpus, tmp_path, flags, message):
    with pytest.raises((ValueError, RuntimeError), match=re.compile(message, re.DOTALL)):
        train(corpus, tmp_path / "new", *flags.split())
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sample_break_mode", "complete"),
        ("pad_to_fixed_length", True),
        ("pad_to_fixed_bsz", True),
        ("shorten_method", "truncate"),
        ("add_bos_token", True),
        ("self_target", True),
        ("past_target", True),
    ],
)
def test_streams_are_neither_cut_nor_padded(corpus, name, value):
    settings = FastWeightLanguageModelingConfig(data=str(corpus), carry_over_state=True, **{name: value})
    with pytest.raises(ValueError, match=f"{name} is {value}; with carry_over_state it must be"):
        FastWeightLanguageModelingTask.setup_task(settings)


def test_a_backend_that_is_not_there_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(libraries, "load", lambda device: f"the {device} kernels are lost")
    with pytest.raises(RuntimeError, match="'native' was asked for: the cpu kernels are lost"):
        train(corpus, tmp_path / "new", "--fast-weight-backend", "native")
    assert not list(tmp_path.rglob("*.pt"))


def test_streams_need_a_batch_size(corpus, tmp_path):
    flags = [*SMALL_MODEL, *QUIET, "--optimizer", "adam", "--max-tokens", "64", "--tokens-per-sample", "16", CARRY]
    with pytest.raises(ValueError, match="batch_size is not set; with carry_over_state"):
        command("train", str(corpus), *TASK, *flags, "--save-dir", str(tmp_path / "new"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokens-per-sample 17 --context-window 16", "tokens_per_sample is 17 .*16 positions"),
        (f"{CARRY} --tokens-per-sample 17", "tokens_per_sample is 17, but the model has 16 positions"),
        ("--tokens-per-sample 8 --context-window 8", "tokens_per_sample without the context window is 0"),
        (f"{CARRY} --tokens-per-sample 8 --context-window 4", "context_window is 4; with carry_over_state"),
        ("--tokens-per-sample 8 --gen-subset nowhere", "no split 'nowhere'"),
    ],
)
def test_contexts_that_cannot_be_are_named(corpus, model, flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate(corpus, model(), *flags.split())


def test_generation_from_carried_states_is_refused(corpus, model, capsys):
    flags = ["--path", str(model()), CARRY, "--tokens-per-sample", "16", "--batch-size", "2", "--gen-subset", "test"]
    refused = "carry_over_state is set, but generation starts from empty states"
    with pytest.raises(ValueError, match=refused):
        command("generate", str(corpus), *TASK, *QUIET, *flags)
    assert "H-0" not in capsys.readouterr().out
    # Also where nothing is said of references.
    settings = FastWeightLanguageModelingConfig(data=str(corpus), carry_over_state=True, dataset_impl="mmap")
    task = FastWeightLanguageModelingTask.setup_task(settings)
    task.load_dataset("test")
    with pytest.raises(ValueError, match=refused):
        task.build_generator([], Namespace())


@pytest.mark.slow
def test_a_model_without_state_is_not_evaluated_with_one(corpus, tmp_path):
    train(corpus, tmp_path, "--softmax-attention-layers", "2", "--max-update", "1")
    with pytest.raises(ValueError, match=r"carry_over_state is set, but .* layers 2 \(softmax\)"):
        evaluate(corpus, tmp_path / "checkpoint_last.pt", CARRY, "--tokens-per-sample", "8")


def test_an_empty_corpus_is_named(tmp_path):
    (tmp_path / "train.txt").write_text("a b c\n")
    for name in ("valid", "test"):
        (tmp_path / f"{name}.txt").write_text("")
    with pytest.raises(ValueError, match="split 'valid' holds no tokens"):
        train(binarise(tmp_path), tmp_path / "new", "--max-update", "1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--update-rule sum", "mixers is 'delta' in the checkpoint and 'sum' in the model"),
        ("--decoder-ffn-embed-dim 48", "size mismatch for decoder.layers.0.fc1.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_kept(corpus, model, tmp_path, flags, message):
    kept = Path(shutil.copy(model(), tmp_path))
    before = kept.read_bytes()
    with pytest.raises(Exception) as error:
        train(corpus, tmp_path, *flags.split(), "--max-update", "50")
    # fairseq wraps what a model says of a checkpoint; both are printed.
    assert re.search(message, printed(error))
    assert kept.read_bytes() == before and list(tmp_path.iterdir()) == [kept]


def printed(error: pytest.ExceptionInfo[Exception]) -> str:
    """What Python prints where nothing catches it."""
    return "".join(traceback.format_exception(error.value))


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def spoil(checkpoint: Path, bad: Path, kind: str) -> None:
    if kind == "hostile":
        torch.save({"model": Hostile(bad.with_name("touched")), "cfg": None, "args": None}, bad)
    elif kind == "truncated":
        bad.write_bytes(checkpoint.read_bytes()[:-2000])
    elif kind == "empty":
        bad.write_bytes(b"")


# fairseq-train starts anew where there is no checkpoint.
@pytest.mark.parametrize(
    ("name", "kind"), [("eval_lm", "truncated"), ("eval_lm", "missing"), ("eval_lm", "hostile"), ("train", "empty")]
)
def test_a_bad_checkpoint_stops_everything_and_runs_nothing(corpus, model, tmp_path, caplog, name, kind):
    bad = tmp_path / "checkpoint_last.pt"
    spoil(model(), bad, kind)
    before = [(path, path.read_bytes()) for path in tmp_path.iterdir()]
    with pytest.raises(Exception) as error:
        train(corpus, tmp_path) if name == "train" else evaluate(corpus, bad, "--tokens-per-sample", "16")
    assert str(bad) in printed(error) + caplog.text
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == before


@pytest.mark.slow
def test_a_process_that_is_given_a_hostile_checkpoint_fails(corpus, model, tmp_path):
    bad = tmp_path / "checkpoint_last.pt"
    spoil(model(), bad, "hostile")
    before = bad.read_bytes()
    flags = [*SMALL_MODEL, *QUIET, "--optimizer", "adam", "--batch-size", "4", "--save-dir", str(tmp_path)]
    result = spawn("train", str(corpus), *TASK, "--tokens-per-sample", "16", *flags)
    assert result.returncode != 0 and str(bad) in result.stderr
    assert bad.read_bytes() == before and list(tmp_path.iterdir()) == [bad]
