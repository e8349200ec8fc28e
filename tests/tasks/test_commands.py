"""fairseq's other commands and options, with fast weights."""

import json
import re
from typing import Any

import pytest
import torch
from fairseq.dataclass import initialize

from fairseq_fastweights.ops import backends, libraries
from tests.conftest import DEVICE, QUIET, TASK, command, evaluate, train
from tests.tasks.conftest import TRANSLATION, losses, slow, train_translation, weights

ADAPTIVE = """--arch fast_weight_lm_baevski_wiki103 --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20
    --criterion adaptive_loss --ddp-backend legacy_ddp --adaptive-input-factor 2 --adaptive-softmax-factor 2""".split()
CARRY, APART = "--carry-over-state", "--separate-documents"
WAYS = {"fp16": 2e-3, "bf16": 2e-2, "amp": 2e-2, "checkpoint-activations": 1e-3, "ddp-backend=legacy_ddp": 2e-3}
"""How near the loss is: bfloat16, in which --amp computes on a CPU, keeps 8 bits; the other ways compute the same."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "adaptive", "translation"])
def test_models_train_in_every_way(request, corpus, tmp_path, kind):
    run, data, flags = train, corpus, ["--max-update", "4", "--no-save", *(ADAPTIVE if kind == "adaptive" else [])]
    if kind == "translation":
        run, data = train_translation, request.getfixturevalue("pairs")
        flags += "--dropout 0.2 --attention-dropout 0.1 --feature-map favor".split()
    plain = losses(run(data, tmp_path, *flags))
    assert len(plain) == 4
    for way in ["fp16"] if kind == "adaptive" else WAYS:
        log = run(data, tmp_path, *flags, f"--{way}")
        assert losses(log) == pytest.approx(plain, rel=WAYS[way]), way
        if way == "amp" and DEVICE == ["--cpu"]:
            assert "--amp on a CPU computes in bfloat16" in log and losses(log) != plain


GPT2 = "fast_weight_lm_gpt2_small"
# Models' settings in a yaml file, beside those that the architecture sets.
DESCRIBED = {
    "fast_weight_lm": {"update_rule": "decay", "share_decoder_input_output_embed": True, "decoder_attention_heads": 2}
    | {f"decoder_{name}_dim": 32 for name in ("input", "embed", "output", "ffn_embed")},
    "fast_weight_lm_wiki103_small": {"adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"},
    GPT2: {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "decoder_attention_heads": 2},
    "transformer_lm_gpt2_tiny": {},
}


@pytest.fixture
def train_as_described(corpus, tmp_path, monkeypatch):
    """Three updates of a one-layer model by a yaml file; the checkpoint."""

    def train_as_described(arch: str, settings: dict[str, Any], criterion: str = "cross_entropy", **task: Any) -> Any:
        run = {
            "common": {"cpu": True, "log_format": "json", "log_interval": 1, "user_dir": TASK[1]},
            "task": {"_name": TASK[3], "data": str(corpus), "tokens_per_sample": 16, "carry_over_state": True, **task},
            "model": {"_name": arch, "decoder_layers": 1, **settings},
            "criterion": {"_name": criterion},
            "distributed_training": {"ddp_backend": "legacy_ddp"},
            "optimizer": {"_name": "adam", "lr": [0.01]},
            "lr_scheduler": {"_name": "fixed"},
            "dataset": {"batch_size": 4, "num_workers": 0, "disable_validation": True},
            "optimization": {"max_update": 3, "lr": [0.01]},
            "checkpoint": {"save_dir": str(tmp_path / "described")},
        }
        (tmp_path / "run.yaml").write_text(json.dumps(run))
        monkeypatch.chdir(tmp_path)  # hydra leaves its outputs where it is run
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as exceptions
        command("hydra_train", "--config-dir", str(tmp_path), "--config-name", "run")
        return torch.load(tmp_path / "described" / "checkpoint_last.pt", weights_only=True)

    return train_as_described


@pytest.mark.slow
@pytest.mark.parametrize("arch", DESCRIBED)
def test_hydra_trains_a_model_from_a_yaml_file(request, corpus, tmp_path, train_as_described, arch):
    if arch != "fast_weight_lm":
        request.getfixturevalue("our_fairseq")
    settings, carried = DESCRIBED[arch], arch.startswith("fast_weight_lm")
    criterion = "adaptive_loss" if "adaptive_softmax_cutoff" in settings else "cross_entropy"
    # The task's max_target_positions must reach the model before the architecture's defaults.
    state = train_as_described(arch, settings, criterion, carry_over_state=carried, max_target_positions=24)
    assert state["cfg"]["model"]["_name"] == arch
    assert state["last_optimizer_state"] is not None and state["optimizer_history"][-1]["num_updates"] == 3

    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in settings.items()]
    flags += ["--carry-over-state"] if carried else []
    flags += f"--criterion {criterion} --ddp-backend legacy_ddp --max-update 3 --disable-validation".split()
    flags += "--max-target-positions 24 --tokens-per-sample 16 --batch-size 4 --optimizer adam --lr 0.01".split()
    flags += ["--arch", arch, "--decoder-layers", "1", "--save-dir", str(tmp_path / "commanded")]
    command("train", str(corpus), *TASK, *QUIET, *flags)
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("described", "commanded")]
    assert state["cfg"]["model"] == torch.load(paths[1], weights_only=True)["cfg"]["model"]
    described, commanded = map(weights, paths)
    assert described.keys() == commanded.keys()
    assert all(torch.equal(x, commanded[name]) for name, x in described.items())


@pytest.fixture
def other_fairseq(monkeypatch):
    """As fairseq itself is, and older builds of it are."""
    monkeypatch.setattr(initialize, "add_architecture", lambda *settings: None, raising=False)


def test_a_fairseq_that_would_train_another_model_is_refused(train_as_described, tmp_path, other_fairseq):
    message = f"model._name is '{GPT2}', .*is False.*; it must be 'fast_weight_lm', .* tools/build_fairseq.py"
    with pytest.raises(ValueError, match=message):
        train_as_described(GPT2, {"share_decoder_input_output_embed": True})
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_the_command_line_and_checkpoints_need_no_such_fairseq(corpus, tmp_path, other_fairseq):
    train(corpus, tmp_path, "--arch", GPT2, "--max-update", "4")
    path = tmp_path / "checkpoint_last.pt"
    loss, _ = evaluate(corpus, path, "--tokens-per-sample", "16")
    # As a model that lost a switch was saved.
    state = torch.load(path, weights_only=True)
    assert state["cfg"]["model"]["mask_special_symbols"]
    state["cfg"]["model"]["mask_special_symbols"] = False
    torch.save(state, path)
    assert evaluate(corpus, path, "--tokens-per-sample", "16")[0] != loss


@pytest.mark.parametrize("off", ["mask_special_symbols", "share_decoder_input_output_embed"])
def test_a_yaml_file_may_turn_off_an_architectures_switch(our_fairseq, train_as_described, off):
    model = train_as_described(GPT2, {**DESCRIBED[GPT2], off: False})["cfg"]["model"]
    assert not model[off] and model["decoder_learned_pos"] and model["decoder_output_dim"] == 16


@pytest.mark.parametrize("there", [True, slow(False)])
def test_trainings_evaluations_and_generations_say_once_which_backend_runs(corpus, pairs, tmp_path, monkeypatch, there):
    """If there are no kernels, a warning tells how to get them."""
    if there:
        told = f"native ({backends.cpu_instruction_set()}) on the CPU"
    else:
        monkeypatch.setitem(libraries._outcomes, "cpu", "the kernels were lost; build them with care")
        monkeypatch.setattr(backends, "chosen", {})
        told = "chunkwise on the CPU: the kernels were lost; build them with care"
    text, two = [str(corpus), *TASK, *QUIET], ["--max-update", "2"]
    read = ["--path", str(tmp_path / "lm" / "checkpoint_last.pt"), "--tokens-per-sample", "16", "--batch-size", "8"]
    path = str(tmp_path / "mt" / "checkpoint_last.pt")
    for log in (
        train(corpus, tmp_path / "lm", *two),
        command("eval_lm", *text, *read, "--gen-subset", "valid"),
        command("generate", *text, *read, "--sample-break-mode", "eos", "--max-len-b", "20"),
        train_translation(pairs, tmp_path / "mt", *two),
        command("generate", str(pairs), *TRANSLATION, *QUIET, "--path", path, "--max-len-b", "3"),
    ):
        assert re.findall("fast weight rules run by (.*)", log) == [told]


@pytest.mark.slow
@pytest.mark.parametrize("contexts", ["--sample-break-mode eos", CARRY, APART, f"{APART} {CARRY}"])
def test_generate_scores_as_evaluation_does(corpus, model, capsys, contexts):
    # A reference scored token by token is the line as the language model sees it after a line end, or the text so far.
    checkpoint = model(*["--no-token-positional-embeddings"] * ("documents" in contexts))
    flags = [*contexts.split(), "--batch-size", "8", "--tokens-per-sample", "16"]
    loss, _ = evaluate(corpus, checkpoint, *flags)
    flags += ["--path", str(checkpoint), "--gen-subset", "test"]
    command("generate", str(corpus), *TASK, *QUIET, *flags, "--score-reference")
    scores = re.findall(r"^P-\d+\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    values = [float(x) for row in scores for x in row.split()]
    assert -sum(values) / len(values) == pytest.approx(loss, abs=1e-3)


def test_a_batch_of_prompts_is_continued_as_each_alone(our_fairseq, corpus, model, tmp_path, capsys):
    """fairseq-interactive with a buffer, and fairseq-generate with batches, of samples that hold several lines."""
    (tmp_path / "input").write_text("w1 w2 w3 w4 w5\n\nw7\nw8 w9 w8\n")
    flags = ["--path", str(model()), "--beam", "2", "--max-len-b", "25", "--min-len", "9", *TASK, *QUIET]
    capsys.readouterr()
    for name, reading, sizes in (
        ("interactive", ["--input", str(tmp_path / "input")], ([], ["--buffer-size", "9", "--batch-size", "4"])),
        ("generate", ["--tokens-per-sample", "13"], (["--batch-size", "1"], ["--batch-size", "7"])),
    ):
        made = []
        for size in sizes:
            command(name, str(corpus), *reading, *size, *flags)
            lines = re.findall(r"^([SHP])-(\d+)\t(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
            made.append({(kind, int(number)): text for kind, number, text in lines})
        together, alone = made
        assert together.keys() == alone.keys() and len(alone) >= 12
        for (kind, number), text in alone.items():
            if kind == "H":
                words, score = text.split("\t")[1], float(text.split("\t")[0])
                others_score, others_words = together[kind, number].split("\t")
                assert words == others_words and score == pytest.approx(float(others_score), abs=1e-3)
                assert words.startswith(alone["S", number]) and len(alone["P", number].split()) >= 10


def test_a_finished_command_trains_no_further_update(our_fairseq, corpus, tmp_path):
    def updates() -> int:
        return torch.load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]

    for _ in range(2):
        train(corpus, tmp_path, "--max-update", "2", "--disable-validation")
        assert updates() == 2
