"""transformers' Trainer fine-tunes an exported model; torch.compile and device maps take it."""

from __future__ import annotations

import pytest
import torch
import transformers

from fairseq_fastweights.huggingface import FastWeightForCausalLM
from tests.huggingface.test_generation import build, draw


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_takes_ten_steps(checkpointing, tmp_path):
    pytest.importorskip("accelerate")
    model = build("delta,softmax:2")
    texts = [{"input_ids": row, "labels": row} for row in draw(8, 12)]
    arguments = transformers.TrainingArguments(
        tmp_path / "out",
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        logging_steps=1,
        gradient_checkpointing=checkpointing,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        save_steps=10,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=texts)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
    saved = FastWeightForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-10")
    tokens = draw(1, 5)
    assert torch.equal(saved(tokens).logits, model.eval()(tokens).logits)


def test_a_device_map_is_taken(tmp_path):
    pytest.importorskip("accelerate")
    model, tokens = build("delta"), draw(2, 5)
    model.save_pretrained(tmp_path)
    placed = FastWeightForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert torch.equal(placed(tokens).logits, model(tokens).logits)


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
