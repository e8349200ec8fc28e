"""fairseq's other commands and options, with fast weights."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import sys
from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass import initialize

from tests.conftest import QUIET, TASK, command, evaluate, repeated, train

ADAPTIVE = """--adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --criterion adaptive_loss
    --ddp-backend legacy_ddp""".split()
WAYS = {"fp16": 1e-3, "bf16": 1e-2, "checkpoint-activations": 1e-3, "ddp-backend=legacy_ddp": 1e-3}
"""How near the loss is: bfloat16 keeps 8 bits; the other ways compute the same."""
FACTORS = ["--adaptive-input-factor", "2", "--adaptive-softmax-factor", "2"]


def last_loss(log: str) -> float:
    return float(re.findall(r'"train_loss": "([^"]+)"', log)[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ways"),
    [([], WAYS), (["--arch", "fast_weight_lm_baevski_wiki103", *ADAPTIVE, *FACTORS], ["fp16"])],
    ids=["", "adaptive"],
)
def test_models_train_in_every_way(corpus, tmp_path, flags, ways):
    common = [*flags, "--max-update", "4", "--no-save"]
    plain = last_loss(train(corpus, tmp_path, *common))
    assert math.isfinite(plain)
    for way in ways:
        assert last_loss(train(corpus, tmp_path, *common, f"--{way}")) == pytest.approx(plain, rel=WAYS[way]), way


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["delta", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("sum", "gated", "decay"))]
)
def test_every_rule_learns(corpus, tmp_path, rule):
    log = train(corpus, tmp_path, "--update-rule", rule, "--no-save", "--max-update", "40")
    losses = [float(x) for x in re.findall(r'"loss": "([^"]+)"', log)]
    assert losses[-1] < losses[0] - 1


# Of a model in a yaml file; what its architecture sets is left to it.
DESCRIBED = {
    "fast_weight_lm": {
        "update_rule": "decay",
        "share_decoder_input_output_embed": True,
        **dict.fromkeys(("decoder_input_dim", "decoder_embed_dim", "decoder_output_dim", "decoder_ffn_embed_dim"), 32),
        "decoder_attention_heads": 2,
    },
    "fast_weight_lm_wiki103_small": {"adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"},
    "fast_weight_lm_gpt2_small": {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "decoder_attention_heads": 2},
    "transformer_lm_gpt2_tiny": {},
}


@pytest.fixture
def train_as_described(corpus, tmp_path, monkeypatch):
    """Three updates of a one-layer model by a yaml file; the checkpoint."""

    def train_as_described(arch: str, task: str, criterion: str, **settings: object) -> dict[str, Any]:
        (tmp_path / "run.yaml").write_text(
            f"""
common: {{cpu: true, log_format: json, log_interval: 1, user_dir: {TASK[1]}}}
task: {{_name: fast_weight_language_modeling, data: {corpus}, tokens_per_sample: 16, {task}}}
model: {json.dumps({"_name": arch, "decoder_layers": 1, **settings})}
criterion: {{_name: {criterion}}}
distributed_training: {{ddp_backend: legacy_ddp}}
optimizer: {{_name: adam, lr: [0.01]}}
lr_scheduler: {{_name: fixed}}
dataset: {{batch_size: 4, num_workers: 0, disable_validation: true}}
optimization: {{max_update: 3, lr: [0.01]}}
checkpoint: {{save_dir: {tmp_path}/described}}
"""
        )
        monkeypatch.chdir(tmp_path)  # hydra leaves its outputs where it is run
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as exceptions
        command("hydra_train", "--config-dir", str(tmp_path), "--config-name", "run")
        return torch.load(tmp_path / "described" / "checkpoint_last.pt", weights_only=True)

    return train_as_described


@pytest.mark.slow
@pytest.mark.parametrize("arch", DESCRIBED)
def test_hydra_trains_what_a_yaml_file_describes(request, corpus, tmp_path, train_as_described, arch):
    if arch != "fast_weight_lm":
        request.getfixturevalue("our_fairseq")
    settings = DESCRIBED[arch]
    criterion = "adaptive_loss" if "adaptive_softmax_cutoff" in settings else "cross_entropy"
    carried = arch.startswith("fast_weight_lm")
    # What a task says of a model is said before the architecture, too.
    task = f"carry_over_state: {str(carried).lower()}, max_target_positions: 24"
    state = train_as_described(arch, task, criterion, **settings)
    assert state["cfg"]["model"]["_name"] == arch
    assert state["last_optimizer_state"] is not None and state["optimizer_history"][-1]["num_updates"] == 3

    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in settings.items()]
    flags += ["--carry-over-state"] if carried else []
    flags += "--max-target-positions 24 --tokens-per-sample 16 --batch-size 4 --optimizer adam --lr 0.01".split()
    flags += f"--criterion {criterion} --ddp-backend legacy_ddp --max-update 3 --disable-validation".split()
    architecture = ["--arch", arch, "--decoder-layers", "1"]
    command("train", str(corpus), *TASK, *architecture, *QUIET, *flags, "--save-dir", str(tmp_path / "commanded"))
    commanded = torch.load(tmp_path / "commanded" / "checkpoint_last.pt", weights_only=True)
    assert state["cfg"]["model"] == commanded["cfg"]["model"]
    assert state["model"].keys() == commanded["model"].keys()
    for name, x in state["model"].items():
        # fairseq looks at the type of these, and sets no value.
        assert name.endswith("._float_tensor") or torch.equal(x, commanded["model"][name]), name


def test_a_fairseq_that_would_train_another_model_is_refused(train_as_described, tmp_path, monkeypatch):
    # As fairseq itself is, and older builds of it are.
    monkeypatch.setattr(initialize, "add_architecture", lambda *settings: None, raising=False)
    arch = "fast_weight_lm_gpt2_small"
    message = f"model._name is '{arch}', .*is False.*; it must be 'fast_weight_lm', .* tools/build_fairseq.py"
    with pytest.raises(ValueError, match=message):
        train_as_described(arch, "carry_over_state: true", "cross_entropy", share_decoder_input_output_embed=True)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_the_command_line_and_checkpoints_need_no_such_fairseq(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(initialize, "add_architecture", lambda *settings: None, raising=False)
    sizes = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2".split()
    flags = ["--arch", "fast_weight_lm_gpt2_small", *sizes, "--decoder-input-dim", "16", "--decoder-output-dim", "16"]
    train(corpus, tmp_path, *flags)
    path = tmp_path / "checkpoint_last.pt"
    loss, _ = evaluate(corpus, path, "--tokens-per-sample", "16")
    # As a model that lost a switch was saved.
    state = torch.load(path, weights_only=True)
    assert state["cfg"]["model"]["mask_special_symbols"]
    state["cfg"]["model"]["mask_special_symbols"] = False
    torch.save(state, path)
    assert evaluate(corpus, path, "--tokens-per-sample", "16")[0] != loss


@pytest.mark.parametrize("off", ["mask_special_symbols", "share_decoder_input_output_embed"])
def test_a_yaml_file_may_turn_off_what_an_architecture_turns_on(our_fairseq, train_as_described, off):
    arch = "fast_weight_lm_gpt2_small"
    settings = {**DESCRIBED[arch], off: False}
    model = train_as_described(arch, "carry_over_state: true", "cross_entropy", **settings)["cfg"]["model"]
    assert not model[off] and model["decoder_learned_pos"] and model["decoder_output_dim"] == 16


@pytest.mark.slow
def test_a_moving_average_of_the_weights_is_kept_and_goes_on(corpus, tmp_path):
    ema = ["--store-ema", "--ema-decay", "0.5"]
    before: dict[str, torch.Tensor] = {}
    for updates in ("1", "2", "3"):
        # From the second on it goes on from a checkpoint.
        restored = ["--restore-file", str(tmp_path / "last.pt")] if before else []
        log = train(corpus, tmp_path / updates, *ema, "--max-update", updates, *restored)
        assert ("Loading EMA from checkpoint" in log) == bool(before)
        shutil.copy(tmp_path / updates / "checkpoint_last.pt", tmp_path / "last.pt")
        state = torch.load(tmp_path / "last.pt", weights_only=True)
        averaged, weights = state["extra_state"]["ema"], state["model"]
        assert state["optimizer_history"][-1]["num_updates"] == int(updates)
        assert averaged.keys() == weights.keys()
        settings = "decoder.settings_version"
        assert averaged[settings].dtype == torch.int64 and torch.equal(averaged[settings], weights[settings])
        for name, x in averaged.items():
            # fairseq takes the embeddings' step twice, once for each of their names.
            if before and ".layers." in name:
                assert torch.allclose(x, (before[name] + weights[name]) / 2, atol=1e-7), name
        before = averaged
    assert not torch.equal(before["decoder.layers.0.fc1.weight"], weights["decoder.layers.0.fc1.weight"])
    # What fairseq makes a checkpoint of is the model's.
    checkpoint_utils.save_ema_as_checkpoint(str(tmp_path / "last.pt"), str(tmp_path / "averaged.pt"))
    losses = [
        evaluate(corpus, tmp_path / f"{name}.pt", "--tokens-per-sample", "16")[0] for name in ("averaged", "last")
    ]
    assert math.isfinite(losses[0]) and losses[0] != losses[1]


@pytest.fixture
def interactive(corpus, model, monkeypatch, capsys):
    """Continues texts; for each hypothesis the number of its text, and its words. It may be longer than trained on."""

    def continued(texts: list[str], *flags: str) -> list[tuple[int, list[str]]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{text}\n" for text in texts)))
        path = ["--path", str(model("--max-target-positions", "32"))]
        command("interactive", str(corpus), *TASK, *QUIET, *path, *flags)
        found = re.findall(r"^H-(\d)\t(\S+)\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
        assert all(math.isfinite(float(score)) and text.startswith(texts[int(i)]) for i, score, text in found)
        return [(int(i), text.split()) for i, _, text in found]

    return continued


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "numbers", "size"),
    [("--beam 4", [0, 1], 2), ("--sampling --sampling-topk 5 --beam 2 --nbest 2 --seed 3", [0, 0, 1, 1], 3)],
)
def test_texts_are_continued_and_no_sequence_of_words_comes_twice(our_fairseq, interactive, search, numbers, size):
    given = ["w1 w2 w1 w2 w1 w2", "w5"]  # which stay as they are
    for option in ([], ["--no-repeat-ngram-size", str(size)]):
        found = interactive(given, *search.split(), "--min-len", "20", "--max-len-b", "25", *option)
        assert [number for number, _ in found] == numbers
        twice = [repeated(words, size, len(given[number].split())) for number, words in found]
        assert any(twice) != bool(option)


@pytest.mark.slow
@pytest.mark.parametrize("contexts", ["--sample-break-mode eos", "--carry-over-state"])
def test_generate_scores_as_evaluation_does(corpus, model, capsys, contexts):
    # A reference scored token by token is the line as the language model sees it after a line end, or the text so far.
    flags = [*contexts.split(), "--batch-size", "8", "--tokens-per-sample", "16"]
    loss, _ = evaluate(corpus, model(), *flags)
    flags += ["--path", str(model()), "--gen-subset", "test"]
    command("generate", str(corpus), *TASK, *QUIET, *flags, "--score-reference")
    scores = re.findall(r"^P-\d+\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    values = [float(x) for row in scores for x in row.split()]
    assert -sum(values) / len(values) == pytest.approx(loss, abs=1e-3)


@pytest.mark.slow
def test_an_old_checkpoint_with_a_namespace_loads(corpus, model, tmp_path):
    state = torch.load(model(), weights_only=True)
    options, task = state["cfg"]["model"], state["cfg"]["task"]
    choices = {"criterion": "cross_entropy", "optimizer": "adam", "lr_scheduler": "fixed"}
    names = {"arch": options["_name"], "task": task["_name"], **choices}
    state["args"] = Namespace(**{**task, **options, **names})
    state["cfg"] = None
    torch.save(state, tmp_path / "old.pt")
    flags = ["--carry-over-state", "--tokens-per-sample", "16"]
    assert evaluate(corpus, tmp_path / "old.pt", *flags) == evaluate(corpus, model(), *flags)
