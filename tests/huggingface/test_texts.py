"""Several texts in one row, as transformers' collator puts them there, are read as if each stood alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from fairseq_fastweights.huggingface import FastWeightCache, FastWeightForCausalLM, GenerationStep
from fairseq_fastweights.mixers.registry import MIXERS
from tests.huggingface.test_generation import LEARNED, ROUNDING, build, draw

NONE = {"position_embeddings": "none"}
LENGTHS = (3, 1, 4, 2)
TEXTS = [draw(1, length, seed=length)[0] for length in LENGTHS]
ABLE = [name for name in MIXERS if build(name).model.mixers[0].takes_starts]


def flat(**options: Any) -> dict[str, Any]:
    """The collator's batch of the texts."""
    batch = DataCollatorWithFlattening(**options)([{"input_ids": text.tolist()} for text in TEXTS], return_tensors="pt")
    return dict(batch)


def alone(model: Any) -> Tensor:
    return torch.cat([model(text[None]).logits[0] for text in TEXTS])


@pytest.mark.parametrize("mixers", [*ABLE, "delta,softmax:2"])
@torch.no_grad()
def test_they_are_read_as_if_alone(mixers):
    rotary = [{**NONE, "mixer_settings": {"rotary_dim": 4}}] if "softmax" in mixers else []
    for settings in ({}, LEARNED, *rotary):
        model = build(mixers, **settings)
        expected = alone(model)
        batch = flat(return_seq_idx=True, return_flash_attn_kwargs=True)
        lengths = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        for names in (["position_ids"], ["seq_idx"], lengths, ["position_ids", "seq_idx", *lengths]):
            logits = model(batch["input_ids"], **{name: batch[name] for name in names}).logits[0]
            assert (logits - expected).abs().max() <= ROUNDING, (settings, names)
        losses = [model(text[None], labels=text[None]).loss * (len(text) - 1) for text in TEXTS if len(text) > 1]
        assert torch.allclose(model(**flat()).loss, sum(losses) / (sum(LENGTHS) - len(LENGTHS)), atol=1e-5)
        # In several rows, with padding on either side and within, whatever is said there.
        kept = torch.ones(3, 12, dtype=torch.bool)
        kept[0, :2], kept[1, 10:], kept[2, [2, 7]] = False, False, False
        tokens, places = torch.full((2, 3, 12), 7)  # which at padding mean nothing
        tokens[kept], places[kept] = batch["input_ids"].repeat(1, 3)[0], batch["position_ids"].repeat(1, 3)[0]
        read = {"attention_mask": kept.long(), "position_ids": places}
        logits = model(tokens, **read).logits[kept].view(3, 10, -1)
        assert (logits - expected).abs().max() <= ROUNDING
        # Each row's last text goes on, with places that are said or counted.
        more = draw(3, 2)
        after = model(torch.cat([TEXTS[-1].expand(3, -1), more], dim=1)).logits[:, -2:]
        for position_ids in (None, torch.tensor([[2, 3]])):
            cache = model(tokens, **read).past_key_values
            rest = model(more, position_ids=position_ids, past_key_values=cache).logits
            assert (rest - after).abs().max() <= ROUNDING


@torch.no_grad()
def test_places_that_go_on_begin_no_text():
    """As those that `generate` makes of a mask, those of no text, and those of a part; learned ones may skip places."""
    model, tokens = build("gated,softmax:2", **LEARNED), draw(2, 6)
    expected = model(tokens).logits
    for ids in (torch.arange(6)[None], torch.arange(6).expand(2, -1).int()):
        assert torch.equal(model(tokens, position_ids=ids).logits, expected)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    padded = model(tokens, attention_mask=mask, position_ids=places)
    assert (padded.logits - model(tokens, attention_mask=mask).logits)[mask == 1].abs().max() <= ROUNDING
    assert padded.past_key_values.read.tolist() == [4, 6]
    skipping = model(tokens, position_ids=torch.tensor([[0, 1, 2, 3, 4, 9]])).logits
    assert torch.equal(skipping[:, :5], expected[:, :5]) and not torch.allclose(skipping[:, 5], expected[:, 5])


@pytest.mark.parametrize(
    ("mixers", "arguments", "message"),
    [
        ("linformer,delta:2", {"position_ids": [[0, 1, 0, 1]]}, "several texts, .* but linformer cannot keep them"),
        ("abc", {"seq_idx": [[0, 0, 1, 1]]}, "several texts, .* but abc cannot .* all mixers be of sum, gated, "),
        ("delta", {"position_ids": [[0, 1, 2]]}, r"position_ids has shape \(1, 3\); it must be \(1, 4\)"),
        ("delta", {"position_ids": [[0.0, 1, 2, 3]]}, r"position_ids is of shape .* it must be a tensor of whole"),
        ("delta", {"position_ids": [[0, -1, 0, 1]]}, "position_ids holds -1; places in texts are at least 0"),
        ("delta", {"position_ids": [[0, 1, 2, 7]]}, "position_ids skips places before 7 in row 0; without positional"),
        ("delta", {"seq_idx": [[0, 1]]}, r"seq_idx has shape \(1, 2\)"),
        ("delta", {"cu_seq_lens_q": [0, 2, 5]}, r"cu_seq_lens_q is \[0, 2, 5\]; it must rise from 0 to 4"),
        ("delta", {"cu_seq_lens_q": [[0, 4]]}, r"cu_seq_lens_q is of shape \(1, 2\)"),
        ("delta", {"cu_seq_lens_q": [0, 2, 4], "cu_seq_lens_k": [0, 3, 4]}, "cu_seq_lens_k is not cu_seq_lens_q"),
        ("delta", {"attention_mask": [[1, 1, 2, 2]]}, "attention_mask holds 2; it must be 0 at padding and 1"),
        ("delta", {"attention_mask": [[0.0, 0, -1e9, 0]]}, "attention_mask holds -1000000000.0; it must be 0 at"),
    ],
)
def test_positions_that_cannot_be_followed_are_refused_by_name(mixers, arguments, message):
    model = build(mixers, **NONE)
    with pytest.raises(ValueError, match=message):
        model(draw(1, 4), **{name: torch.tensor(values) for name, values in arguments.items()})


@pytest.mark.parametrize("given", [torch.ones(2, 2), "x", 3, [1], {"a": 1}])
def test_arguments_of_another_type_are_refused_by_name(given):
    model, tokens = build("delta"), draw(1, 4)
    cache = model(tokens).past_key_values
    read, states = GenerationStep.begin(cache)
    step, token = GenerationStep(model), tokens[:, :1]
    calls = {
        "past_key_values is a": [
            lambda: model(tokens, past_key_values=given),
            lambda: model.generate(tokens, past_key_values=given, max_new_tokens=2),
            lambda: model.model.layers[0](torch.ones(1, 4, 16), past_key_values=given),
        ],
        "cache is a": [lambda: GenerationStep.begin(given)],
        "cache is empty": [lambda: GenerationStep.begin(FastWeightCache(2))],
        "model is a": [lambda: GenerationStep(given)],
        "states is a": [lambda: step(token, read, given)],
        "read is of": [lambda: step(token, given, states)],
        "token is of": [lambda: step(given, read, states)],
        "input_ids is of": [lambda: model(given)],
        "attention_mask ": [lambda: model(tokens, attention_mask=given)],
        **{
            f"{name} is ": [lambda name=name: model(tokens, **{name: given})]
            for name in ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "labels")
        },
        "beam_idx is of": [lambda: cache.reorder_cache(given)],
        "pretrained_model_name_or_path is a": [lambda: FastWeightForCausalLM.from_pretrained(given)],
    }
    for message, tried in calls.items():
        for call in tried:
            if not (message.startswith("pretrained") and isinstance(given, str)):
                with pytest.raises(ValueError, match=f"^{message}"):
                    call()
    with pytest.raises(ValueError, match="inputs_embeds is a"):
        model(inputs_embeds=given)


def test_a_text_that_goes_on_cannot_begin_again():
    model, tokens = build("delta"), draw(1, 4)
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="goes on at 0 in row 0, of which past_key_values has read 4 tokens; it must"):
        model(tokens, position_ids=torch.arange(4)[None], past_key_values=cache)
    with pytest.raises(ValueError, match="seq_idx is given with past_key_values"):
        model(tokens, seq_idx=torch.zeros(1, 4, dtype=torch.long), past_key_values=cache)
    learned = build("delta", **LEARNED)
    with pytest.raises(ValueError, match="ends at position 71 of a text; max_position_embeddings is 64"):
        learned(tokens, position_ids=torch.tensor([[0, 1, 2, 70]]))
