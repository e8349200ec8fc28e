"""fairseq's other commands and options, with fast weights."""

from __future__ import annotations

import io
import math
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from tests.conftest import QUIET, TASK, command, evaluate, train

ADAPTIVE = """--adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --criterion adaptive_loss
    --ddp-backend legacy_ddp""".split()
ARCHITECTURES = {
    "fast_weight_lm": [],
    "fast_weight_lm_wiki103_small": ADAPTIVE,
    "fast_weight_lm_wiki103_medium": ADAPTIVE,
    "fast_weight_lm_baevski_wiki103": [*ADAPTIVE, "--adaptive-input-factor", "2", "--adaptive-softmax-factor", "2"],
}


def last_loss(log: str) -> float:
    return float(re.findall(r'"train_loss": "([^"]+)"', log)[-1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("flags", ["--fp16", "--bf16", "--checkpoint-activations", "--ddp-backend legacy_ddp"])
def test_every_architecture_trains_in_every_way(corpus, tmp_path, arch, flags):
    common = ["--arch", arch, *ARCHITECTURES[arch], "--max-update", "4", "--no-save"]
    loss = last_loss(train(corpus, tmp_path, *common, *flags.split()))
    plain = last_loss(train(corpus, tmp_path, *common))
    # bfloat16 keeps 8 bits; the other ways compute the same.
    assert loss == pytest.approx(plain, rel=1e-2 if flags == "--bf16" else 1e-3)
    assert math.isfinite(loss)


@pytest.mark.parametrize("rule", ["sum", "gated", "decay", "delta"])
def test_every_rule_learns(corpus, tmp_path, rule):
    log = train(corpus, tmp_path, "--update-rule", rule, "--no-save", "--max-update", "40")
    losses = [float(x) for x in re.findall(r'"loss": "([^"]+)"', log)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("arch", ["fast_weight_lm", "fast_weight_lm_wiki103_small"])
def test_hydra_trains_what_a_yaml_file_describes(corpus, tmp_path, monkeypatch, arch):
    cutoffs = 'adaptive_input_cutoff: "10,20", adaptive_softmax_cutoff: "10,20"'
    model = {
        "fast_weight_lm": "update_rule: decay, share_decoder_input_output_embed: true, decoder_input_dim: 32, "
        "decoder_embed_dim: 32, decoder_output_dim: 32, decoder_ffn_embed_dim: 32, decoder_attention_heads: 2",
        "fast_weight_lm_wiki103_small": f"update_rule: delta, {cutoffs}",
    }[arch]
    adaptive = "adaptive_loss" if cutoffs in model else "cross_entropy"
    (tmp_path / "run.yaml").write_text(
        f"""
common: {{cpu: true, log_format: json, log_interval: 1, user_dir: {TASK[1]}}}
task: {{_name: fast_weight_language_modeling, data: {corpus}, tokens_per_sample: 16, carry_over_state: true}}
model: {{_name: {arch}, decoder_layers: 1, {model}}}
criterion: {{_name: {adaptive}}}
distributed_training: {{ddp_backend: legacy_ddp}}
optimizer: {{_name: adam, lr: [0.01]}}
lr_scheduler: {{_name: fixed}}
dataset: {{batch_size: 4, num_workers: 0, disable_validation: true}}
optimization: {{max_update: 5, lr: [0.01]}}
checkpoint: {{save_dir: {tmp_path}/saved}}
"""
    )
    monkeypatch.chdir(tmp_path)  # hydra leaves its outputs where it is run
    command("hydra_train", "--config-dir", str(tmp_path), "--config-name", "run")
    state = torch.load(tmp_path / "saved" / "checkpoint_last.pt", weights_only=True)
    assert state["cfg"]["model"]["_name"] == arch
    assert state["last_optimizer_state"] is not None and state["optimizer_history"][-1]["num_updates"] == 5


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(corpus, folder, "--max-update", "60")
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize("flags", [[], ["--ema-fp32"]], ids=["", "fp32"])
def test_a_moving_average_of_the_weights_is_kept_and_goes_on(corpus, tmp_path, flags):
    ema = ["--store-ema", "--ema-decay", "0.5", *flags]
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


@pytest.mark.parametrize("beam", [1, 4])
def test_interactive_continues_a_text(corpus, trained, monkeypatch, capsys, beam):
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2 w3\nw5\n"))
    command(
        "interactive",
        *[str(corpus), *TASK, *QUIET, "--path", str(trained), "--beam", str(beam), "--max-len-b", "12"],
    )
    hypotheses = re.findall(r"^H-(\d)\t(\S+)\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert [int(number) for number, _, _ in hypotheses] == [0, 1]
    for (_, score, text), start in zip(hypotheses, ("w1 w2 w3", "w5"), strict=True):
        assert math.isfinite(float(score)) and text.startswith(start)


@pytest.mark.parametrize("contexts", ["--sample-break-mode eos", "--carry-over-state"])
def test_generate_scores_as_evaluation_does(corpus, trained, capsys, contexts):
    # A reference scored token by token is the line as the language model sees it after a line end, or the text so far.
    flags = [*contexts.split(), "--batch-size", "8", "--tokens-per-sample", "16"]
    loss, _ = evaluate(corpus, trained, *flags)
    flags += ["--path", str(trained), "--gen-subset", "test"]
    command("generate", str(corpus), *TASK, *QUIET, *flags, "--score-reference")
    scores = re.findall(r"^P-\d+\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    values = [float(x) for row in scores for x in row.split()]
    assert -sum(values) / len(values) == pytest.approx(loss, abs=1e-3)


def test_an_old_checkpoint_with_a_namespace_loads(corpus, trained, tmp_path):
    state = torch.load(trained, weights_only=True)
    model, task = state["cfg"]["model"], state["cfg"]["task"]
    choices = {"criterion": "cross_entropy", "optimizer": "adam", "lr_scheduler": "fixed"}
    names = {"arch": model["_name"], "task": task["_name"], **choices}
    state["args"] = Namespace(**{**task, **model, **names})
    state["cfg"] = None
    torch.save(state, tmp_path / "old.pt")
    flags = ["--carry-over-state", "--tokens-per-sample", "16"]
    assert evaluate(corpus, tmp_path / "old.pt", *flags) == evaluate(corpus, trained, *flags)
