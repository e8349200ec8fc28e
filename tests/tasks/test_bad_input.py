"""What a user can get wrong: a clear error, an exit code that is not 0, nothing written over."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import QUIET, SMALL_MODEL, TASK, binarise, command, evaluate, spawn, train

CARRY = "--carry-over-state"


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(corpus, folder, "--max-update", "2")
    return folder / "checkpoint_last.pt"


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--normalization l2", "normalization is 'l2'; it must be auto, none"),
        ("--update-rule sum --normalization removal", "removal.*sum rule removes nothing"),
        ("--feature-map dpfp --feature-dim 31", "feature_dim is 31.*32"),
        ("--feature-map favor --feature-dim 7", "feature_dim is 7.*even"),
        ("--feature-map dpfp --dpfp-nu 0", "dpfp_nu is 0"),
        ("--feature-dim 0", "feature_dim is 0"),
        ("--softmax-attention-layers 3", "softmax_attention_layers is '3'.*from 1 to 2"),
        ("--decoder-attention-heads 3", "num_heads is 3.*divisor of embed_dim, 32"),
        (f"{CARRY} --sample-break-mode eos", "sample_break_mode is eos.*must be none"),
        (f"{CARRY} --sample-break-mode complete", "sample_break_mode is complete.*must be none"),
        (f"{CARRY} --pad-to-fixed-length", "pad_to_fixed_length is True"),
        (f"{CARRY} --pad-to-fixed-bsz", "pad_to_fixed_bsz is True"),
        (f"{CARRY} --shorten-method truncate", "shorten_method is truncate"),
        (f"{CARRY} --softmax-attention-layers 2", r"softmax_attention_layers is \[2\].*no state to carry"),
        (f"{CARRY} --softmax-attention-layers all", r"softmax_attention_layers is \[1, 2\]"),
        (f"{CARRY} --batch-size 5000", "batch size times the number of processes is 5000"),
        (f"{CARRY} --arch transformer_lm", "TransformerLanguageModel has no state to carry"),
    ],
)
def test_options_that_cannot_work_are_named(corpus, tmp_path, flags, message):
    with pytest.raises((ValueError, RuntimeError), match=re.compile(message, re.DOTALL)):
        train(corpus, tmp_path / "new", *flags.split())
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_a_backend_that_is_not_there_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_NATIVE_CPU", str(tmp_path / "lost.so"))
    flags = [*SMALL_MODEL, *QUIET, "--optimizer", "adam", "--batch-size", "2", "--tokens-per-sample", "16"]
    flags += ["--fast-weight-backend", "native", "--save-dir", str(tmp_path / "new")]
    result = spawn("train", str(corpus), *TASK, *flags)
    assert result.returncode != 0
    assert "'native' was asked for: the CPU kernels could not be loaded" in result.stderr
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_streams_need_a_batch_size(corpus, tmp_path):
    flags = [*SMALL_MODEL, *QUIET, "--optimizer", "adam", "--max-tokens", "64", "--tokens-per-sample", "16", CARRY]
    result = spawn("train", str(corpus), *TASK, *flags, "--save-dir", str(tmp_path / "new"))
    assert result.returncode != 0
    assert "ValueError: batch_size is not set; with carry_over_state" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokens-per-sample 17 --context-window 16", "tokens_per_sample is 17 .*16 positions"),
        ("--tokens-per-sample 17", "tokens_per_sample is 17, but the model has 16 positions"),
        (f"{CARRY} --tokens-per-sample 17", "tokens_per_sample is 17, but the model has 16 positions"),
        ("--tokens-per-sample 8 --context-window 8", "tokens_per_sample without the context window is 0"),
        (f"{CARRY} --tokens-per-sample 8 --context-window 4", "context_window is 4; with carry_over_state"),
        ("--tokens-per-sample 8 --gen-subset nowhere", "no split 'nowhere'"),
    ],
)
def test_contexts_that_cannot_be_are_named(corpus, trained, flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate(corpus, trained, *flags.split())


def test_generation_from_carried_states_is_refused(corpus, trained, capsys):
    flags = ["--path", str(trained), CARRY, "--tokens-per-sample", "16", "--batch-size", "2", "--gen-subset", "test"]
    with pytest.raises(ValueError, match="carry_over_state is set, but generation starts from empty states"):
        command("generate", str(corpus), *TASK, *QUIET, *flags)
    assert "H-0" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_without_state_is_not_evaluated_with_one(corpus, tmp_path):
    train(corpus, tmp_path, "--softmax-attention-layers", "2", "--max-update", "1")
    with pytest.raises(ValueError, match=r"softmax_attention_layers is \[2\]"):
        evaluate(corpus, tmp_path / "checkpoint_last.pt", CARRY, "--tokens-per-sample", "8")


@pytest.mark.parametrize("flags", [[], [CARRY]])
def test_an_empty_corpus_is_named(corpus, tmp_path, flags):
    (tmp_path / "train.txt").write_text("a b c\n")
    for name in ("valid", "test"):
        (tmp_path / f"{name}.txt").write_text("")
    data = binarise(tmp_path)
    with pytest.raises(ValueError, match="split 'valid' holds no tokens"):
        train(data, tmp_path / "new", *flags, "--max-update", "1")


@pytest.mark.slow
def test_a_checkpoint_of_another_rule_size_or_dictionary_is_refused_and_kept(corpus, trained, tmp_path):
    (tmp_path / "train.txt").write_text(" ".join(f"w{i}" for i in reversed(range(40))) + "\n")
    (tmp_path / "valid.txt").write_text("w1\n")
    reordered = binarise(tmp_path)
    for data, flags, message in (
        (corpus, ["--update-rule", "sum"], "update rule is 'delta' in the checkpoint and 'sum' in the model"),
        (corpus, ["--normalization", "none"], "normalization is 'sum' in the checkpoint and 'none'"),
        (corpus, ["--decoder-ffn-embed-dim", "48"], "size mismatch for decoder.layers.0.fc1.weight"),
        (reordered, [], "dictionary digest is .* in the checkpoint and"),
    ):
        folder = tmp_path / "taken"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(trained, folder / "checkpoint_last.pt")
        before = (folder / "checkpoint_last.pt").read_bytes()
        with pytest.raises(Exception) as error:
            train(data, folder, *flags)
        # fairseq wraps what a model says of a checkpoint; both are printed.
        said = [str(error.value), str(error.value.__context__)]
        assert any(re.search(message, text) for text in said), said
        assert (folder / "checkpoint_last.pt").read_bytes() == before
        assert len(list(folder.iterdir())) == 1


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


# fairseq-train starts anew where there is no checkpoint.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("eval_lm", "hostile")]
    + [pytest.param("eval_lm", kind, marks=pytest.mark.slow) for kind in ("truncated", "missing")]
    + [pytest.param("train", kind, marks=pytest.mark.slow) for kind in ("empty", "hostile")],
)
def test_a_bad_checkpoint_stops_everything_and_runs_nothing(corpus, trained, tmp_path, name, kind):
    bad = tmp_path / "checkpoint_last.pt"
    touched = tmp_path / "touched"
    if kind == "hostile":
        torch.save({"model": Hostile(touched), "cfg": None, "args": None}, bad)
    elif kind == "truncated":
        bad.write_bytes(trained.read_bytes()[:-2000])
    elif kind == "empty":
        bad.write_bytes(b"")
    before = bad.read_bytes() if bad.exists() else None
    if name == "train":
        flags = [*SMALL_MODEL, "--optimizer", "adam", "--batch-size", "4", "--save-dir", str(tmp_path)]
    else:
        flags = ["--path", str(bad)]
    result = spawn(name, str(corpus), *TASK, *QUIET, "--tokens-per-sample", "16", *flags)
    assert result.returncode != 0
    assert str(bad) in result.stderr
    assert not touched.exists()
    assert (bad.read_bytes() if bad.exists() else None) == before
