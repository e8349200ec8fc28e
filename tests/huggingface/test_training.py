"""transformers' Trainer fine-tunes an exported model; torch.compile takes it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fairseq_fastweights.huggingface import FastWeightForCausalLM
from tests.huggingface.test_common import BANDS
from tests.huggingface.test_generation import build, draw

ROWS = draw(8, 12)
SMALL = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "learning_rate": 0.01, "max_steps": 2}
SMALL |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}


def trainer(folder: Path, model: Any, texts: Any = ROWS, kind: str = "", **options: Any) -> Any:
    """A Trainer, or that of this kind; those of its options that are no TrainingArguments are its own."""
    pytest.importorskip("accelerate")
    own = {name: options.pop(name) for name in ("compute_metrics", "data_collator") if name in options}
    data = [{"input_ids": row, "labels": row} for row in texts]
    arguments = getattr(transformers, f"{kind}TrainingArguments")(folder, **{**SMALL, **options})
    return getattr(transformers, f"{kind}Trainer")(model, arguments, train_dataset=data, eval_dataset=data[:5], **own)


def pad(texts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def rows(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    words = [text["input_ids"] for text in texts]
    return {
        "input_ids": rows(words, 1),
        "attention_mask": rows([torch.ones_like(x) for x in words], 0),
        "labels": rows(words, -100),
    }


@pytest.mark.parametrize("bands", [{}, BANDS], ids=["logits", "bands"])
def test_the_trainer_evaluates_and_predicts(bands, tmp_path):
    model = build("delta,softmax:2", dropout=0.0, **bands)
    with torch.no_grad():
        expected = model(ROWS[:5]).logits[:, :-1].flatten(0, 1), ROWS[:5, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(*expected).item()
    shapes = {"compute_metrics": lambda seen: {"shape": seen.predictions.shape}}
    found = trainer(tmp_path, model, **shapes).evaluate()
    assert found["eval_shape"] == (5, 12, 44) and found["eval_loss"] == pytest.approx(loss, abs=1e-5)
    predicted = trainer(tmp_path, model).predict([{"input_ids": row} for row in ROWS])
    assert torch.allclose(torch.tensor(predicted.predictions), model(ROWS).logits, atol=1e-5)
    # Labels that the Trainer itself smooths are those of the next words, too.
    smooth = torch.nn.functional.cross_entropy(*expected, label_smoothing=0.1).item()
    smoothed = trainer(tmp_path, model, label_smoothing_factor=0.1).evaluate()["eval_loss"]
    assert smoothed == pytest.approx(smooth, abs=1e-5)
    while_training = trainer(
        tmp_path, model, **shapes, eval_strategy="steps", eval_steps=1, gradient_checkpointing=True
    )
    while_training.train()
    assert [x["eval_shape"] for x in while_training.state.log_history if "eval_shape" in x] == [(5, 12, 44)] * 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_lowers_the_loss_and_saves_the_model(checkpointing, tmp_path):
    model = build("delta,softmax:2", dropout=0.0)
    run = trainer(
        tmp_path, model, max_steps=10, gradient_checkpointing=checkpointing, save_strategy="steps", save_steps=10
    )
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    saved = FastWeightForCausalLM.from_pretrained(tmp_path / "checkpoint-10")
    assert torch.equal(saved.eval()(ROWS).logits, model.eval()(ROWS).logits)


def test_low_rank_adapters_are_trained_by_the_pages_code(tmp_path, monkeypatch):
    """They alone change; the adapters that are saved, and the model that has taken them in, give the same logits."""
    peft = pytest.importorskip("peft", reason="needs peft")
    page = (Path(__file__).resolve().parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from peft .*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = build("window-sum,gated-delta:2", dropout=0.0, mixer_settings={"window_sum_window": 4})
    before = copy.deepcopy(model)
    run = trainer(tmp_path, model)
    made = {"model": model, "Trainer": transformers.Trainer, "arguments": run.args, "texts": run.train_dataset}
    # `merge_and_unload`, the last that the code does, changes the model itself.
    training, merging = code.split("adapted.merge_and_unload()")
    exec(training, made)
    with torch.no_grad():
        adapted = made["adapted"].eval()(ROWS).logits
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            assert torch.equal(parameter, before.get_parameter(name.replace("base_layer.", ""))), name
    with torch.no_grad():
        assert not torch.allclose(before(ROWS).logits, adapted, atol=1e-3)
        assert torch.allclose(peft.PeftModel.from_pretrained(before, "adapter")(ROWS).logits, adapted, atol=1e-5)
        exec(f"adapted.merge_and_unload(){merging}", made)
        merged = FastWeightForCausalLM.from_pretrained("hf-lm-tuned")
        assert torch.allclose(merged(ROWS).logits, adapted, atol=1e-5)


def test_the_trainer_generates_to_evaluate(tmp_path):
    model = build("delta", dropout=0.0)
    options = {"kind": "Seq2Seq", "predict_with_generate": True, "generation_max_length": 15}
    seen = trainer(tmp_path, model, **options).predict([{"input_ids": row, "labels": row} for row in ROWS])
    assert torch.equal(torch.tensor(seen.predictions)[:, :15], model.generate(ROWS, max_length=15))


def test_small_batches_of_padded_texts_are_added_up(tmp_path):
    """The loss of an update is the mean over all its words, however they are divided; flattened texts are no others."""
    texts = [row[:length] for row, length in zip(ROWS, (3, 12, 5, 7, 2, 9, 11, 4), strict=True)]
    flat = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    trained = []
    for size, batches, collator in ((4, 1, pad), (2, 2, pad), (1, 4, pad), (2, 2, flat)):
        model = build("delta,softmax:2", dropout=0.0)
        how = {"per_device_train_batch_size": size, "gradient_accumulation_steps": batches, "data_collator": collator}
        run = trainer(tmp_path, model, texts, **how, optim="sgd", max_grad_norm=0)
        run.train()
        trained.append([run.state.log_history[1]["loss"], run.state.log_history[1]["grad_norm"]])
    for other in trained[1:]:
        assert other == pytest.approx(trained[0], rel=1e-5)


def test_a_run_goes_on_from_a_checkpoint_and_keeps_its_best(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    models = [build("delta,softmax:2", dropout=0.0) for _ in range(2)]
    runs = [trainer(tmp_path, model, **options, load_best_model_at_end=True, bf16=True) for model in models]
    runs[0].train()
    runs[1].train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert runs[0].state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)


def test_compiled_it_computes_the_same():
    model, tokens = build("gated,softmax:2", dropout=0.0), draw(2, 6)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    compiled = torch.compile(model, backend="aot_eager")
    expected, out = (call(tokens, attention_mask=mask, labels=tokens) for call in (model, compiled))
    assert torch.allclose(out.logits, expected.logits, atol=1e-5)
    gradients = [torch.autograd.grad(x.loss, list(model.parameters())) for x in (expected, out)]
    for first, second in zip(*gradients, strict=True):
        assert torch.allclose(first, second, atol=1e-6)
    torch.compiler.reset()
