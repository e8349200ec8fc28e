"""Generation, with every mixer: the cache changes nothing but time, padding on the left nothing at all."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from fairseq_fastweights.huggingface import FastWeightCache, FastWeightConfig, FastWeightForCausalLM
from fairseq_fastweights.mixers.registry import MIXERS
from fairseq_fastweights.ops import backends, libraries
from fairseq_fastweights.ops.backends import say_again

SIZES = {"vocab_size": 44, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "max_position_embeddings": 64}
# Float32, with other orders of sums than without a cache, or without padding.
ROUNDING = 1e-5


def build(mixers: str | list[str], seed: int = 0, **settings) -> FastWeightForCausalLM:
    transformers.set_seed(seed)
    model = FastWeightForCausalLM(FastWeightConfig(**{**SIZES, "mixers": mixers, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    return model


def draw(rows: int, time: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, 44, (rows, time), generator=torch.Generator().manual_seed(seed))


CASES = [*MIXERS, "delta,softmax:2", "mamba,local:2"]
LEARNED = {"position_embeddings": "learned"}
cases = pytest.mark.parametrize("mixers", CASES)


def test_missing_kernels_are_a_warning_once(monkeypatch, caplog):
    monkeypatch.setitem(libraries._outcomes, "cpu", "the kernels were lost; build them with care")
    monkeypatch.setattr(backends, "chosen", {})
    say_again()
    build("delta,mamba:2").generate(draw(2, 3), max_new_tokens=3)
    say_again()
    told = "fast weight rules run by chunkwise on the CPU: the kernels were lost; build them with care"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [told]


@cases
@torch.no_grad()
def test_parts_steps_and_padding_change_nothing(mixers):
    model, tokens = build(mixers, **(LEARNED if mixers in ("gated", "linformer") else {})), draw(3, 9)
    whole = model(tokens, use_cache=False)
    assert whole.past_key_values is None and whole.logits.std() > 0.1
    # In two parts and steps; at most so large a change would be a step too many or too few.
    first = model(tokens[:, :5])
    cache, parts = first.past_key_values, [first.logits]
    assert isinstance(cache, FastWeightCache) and cache.get_seq_length() == 5 and cache.batch_size == 3
    kept = copy.deepcopy(cache)
    for time in range(5, 9):
        out = model(tokens[:, time : time + 1], past_key_values=cache)
        parts.append(out.logits)
    assert out.past_key_values is cache and cache.get_seq_length() == 9
    assert (torch.cat(parts, 1) - whole.logits).abs().max() <= ROUNDING
    assert (model(tokens[:, 5:], past_key_values=kept).logits - whole.logits[:, 5:]).abs().max() <= ROUNDING
    # Padding of several lengths on the left, with masks over all tokens so far or over those of this call.
    width = 9 + 2
    padded, mask = torch.full((3, width), 1), torch.zeros(3, width, dtype=torch.long)
    for row, text in enumerate(tokens):
        length = 9 - 2 * row
        padded[row, width - length :], mask[row, width - length :] = text[:length], 1
    everything = model(padded, attention_mask=mask).logits
    cache = model(padded[:, :8], attention_mask=mask[:, :8]).past_key_values
    rest = model(padded[:, 8:10], attention_mask=mask[:, :10], past_key_values=cache)
    last = model(padded[:, 10:], attention_mask=mask[:, 10:], past_key_values=rest.past_key_values)
    for row in range(3):
        length = 9 - 2 * row
        expected = whole.logits[row, :length]
        assert (everything[row, width - length :] - expected).abs().max() <= ROUNDING
        assert (last.logits[row, 0] - expected[-1]).abs().max() <= ROUNDING
        assert (rest.logits[row] - expected[-3:-1]).abs().max() <= ROUNDING


@cases
def test_generate_gives_the_same_with_and_without_a_cache(mixers):
    model, tokens = build(mixers), draw(2, 6)
    mask = torch.ones_like(tokens)
    tokens[0, :2], mask[0, :2] = 1, 0
    options = {"attention_mask": mask, "max_new_tokens": 7}
    for how in (
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 5},
    ):
        made = []
        for use_cache in (True, False):
            transformers.set_seed(3)
            made.append(model.generate(tokens, **options, **how, use_cache=use_cache))
        assert torch.equal(*made), how
    # A row alone, without its padding, goes on as in the batch.
    greedy = model.generate(tokens, **options, do_sample=False)
    alone = model.generate(tokens[:1, 2:], max_new_tokens=7, do_sample=False)
    assert torch.equal(alone[0], greedy[0, 2:])


HOW: list[dict[str, object]] = [
    *({"min_new_tokens": 6, **others} for others in ({}, {"num_beams": 3, "no_repeat_ngram_size": 2})),
    *({"no_repeat_ngram_size": n} for n in (1, 2)),
    {"repetition_penalty": 1.5, "encoder_repetition_penalty": 1.2},
    {"bad_words_ids": [[5], [7, 8]], "sequence_bias": {(9,): 3.0}, "begin_suppress_tokens": [10]},
    *(
        {"num_beams": 3, "num_return_sequences": 2, **others}
        for others in ({"length_penalty": 2.0}, {"early_stopping": True})
    ),
    {"exponential_decay_length_penalty": (3, 1.5), "forced_eos_token_id": 2, "renormalize_logits": True},
    *({"do_sample": True, "temperature": 0.1, **others} for others in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0})),
    {"guidance_scale": 1.5},
]


@torch.no_grad()
def test_options_give_a_row_the_same_in_a_batch_and_alone():
    model, width = build("window-sum,gated-delta:2").double(), 6
    texts = [draw(1, time, seed=time)[0] for time in (2, 6, 4)]
    padded, mask = torch.full((3, width), 1), torch.zeros(3, width, dtype=torch.long)
    for row, text in enumerate(texts):
        padded[row, width - len(text) :], mask[row, width - len(text) :] = text, 1
    # Padding must not be generated: a penalty for repetition counts it, too, in rows that have some.
    always = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [1], "eos_token_id": 2, "pad_token_id": 1}
    for how in HOW:
        made = model.generate(padded, attention_mask=mask, **{**always, **how})
        together = torch.nn.functional.pad(made, (0, width + 8 - made.shape[1]), value=1).view(3, -1, width + 8)
        for row, text in enumerate(texts):
            alone = model.generate(text[None], attention_mask=torch.ones(1, len(text)), **{**always, **how})
            made = torch.nn.functional.pad(alone, (0, len(text) + 8 - alone.shape[1]), value=1)[:, len(text) :]
            assert torch.equal(made, together[row, :, width:]), how


@cases
def test_generation_in_training_reads_the_prompt(mixers):
    """Also with gradient checkpointing and gradients; and no layer is dropped whose state is kept."""
    model, tokens = build(mixers, dropout=0.0, layerdrop=0.9), draw(2, 6)
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(tokens, **options)
    model.train()
    for _ in range(2):
        assert torch.equal(model.generate(tokens, **options), expected)
        assert torch.equal(type(model).generate.__wrapped__(model, tokens, **options), expected)
        model.gradient_checkpointing_enable()


def test_a_memory_has_one_size_and_beams_take_its_rows():
    model = build("delta,retention:2")
    sizes = [model(draw(2, time)).past_key_values.bytes() for time in (1, 7, 40)]
    assert len(set(sizes)) == 1
    grows = build("softmax")
    assert grows(draw(2, 7)).past_key_values.bytes() < grows(draw(2, 40)).past_key_values.bytes()

    cache = model(draw(2, 5)).past_key_values
    before = {name: x.clone() for name, x in cache.layers[0].state.items()}
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    for name, x in cache.layers[0].state.items():
        assert torch.equal(x, before[name][[1, 0, 0, 0]]), name
    assert cache.batch_size == 4 and cache.read.tolist() == [5] * 4
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.bytes() == 0 and cache.get_max_length() == -1


def test_streaming_and_going_on_from_a_cache():
    model, tokens = build("gated,softmax:2"), draw(1, 6)

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamer = Streamer()
    made = model.generate(tokens, max_new_tokens=5, do_sample=False, streamer=streamer)
    assert streamer.tokens == [*made[0].tolist(), -1]
    # A text goes on from its cache.
    first = model.generate(tokens, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    rest = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=3, do_sample=False)
    assert torch.equal(rest, made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values is a DynamicCache; it must be"),
        ({"past_key_values": FastWeightCache(3)}, "past_key_values has 3 layers; the model has 2"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask has shape \(2, 3\); it must be \(2, 6\)"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask has shape \(2, 1, 6, 6\)"),
        ({"inputs_embeds": torch.ones(2, 6, 16)}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": draw(2, 65)}, "ends at position 65 of a text; max_position_embeddings is 64"),
    ],
)
def test_bad_calls_are_refused_by_name(arguments, message):
    model = build("delta", **LEARNED)
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": draw(2, 6), **arguments})


def test_operations_that_a_state_cannot_do_are_refused():
    model, tokens = build("delta"), draw(2, 6)
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="past_key_values has 2 rows; the batch has 3"):
        model(draw(3, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(1)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(tokens[:1], assistant_model=build("delta"), max_new_tokens=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'atention_mask'"):
        model(tokens, atention_mask=torch.ones(2, 6))
