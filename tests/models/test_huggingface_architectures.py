"""The architectures of GPT-2 and Pythia have the sizes of their sources, and masked symbols have probability 0."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary

from fairseq_fastweights.mixers.memory_attention import MemoryAttention
from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel
from fairseq_fastweights.models.mixer_layers import ParallelDecoderLayer

# Layers, width, heads, and the parameters of the published models.
GPT2 = {
    "small": (12, 768, 12, 124_439_808),
    "medium": (24, 1024, 16, 354_823_168),
    "large": (36, 1280, 20, 774_030_080),
    "xl": (48, 1600, 25, 1_557_611_200),
}
PYTHIA = {
    "70m": (6, 512, 8, 70_426_624),
    "160m": (12, 768, 12, 162_322_944),
    "410m": (24, 1024, 16, 405_334_016),
    "1b": (16, 2048, 8, 1_011_781_632),
}
# Choi 2024, Table 1: the Pythia that it is but for retention, heads of that, and parameters with 50,304 word types and
# 3 special ones, in a model whose embeddings are not tied.
RETNET = {"430m": ("410m", 4, 430_524_416), "1b": ("1b", 8, 1_078_923_264)}


@pytest.fixture(scope="module")
def on_meta(fairseq):
    """`on_meta(arch)`: a model at full size, without memory for its weights, and its arguments."""
    dictionaries = {"gpt2": Dictionary(), "pythia": Dictionary(), "retnet": Dictionary()}
    for name, words in dictionaries.items():
        for i in range((50257 if name == "gpt2" else 50304) - 1):  # </s> is one of the source's
            words.add_symbol(str(i))

    def build(arch: str, flags: str = "--softmax-attention-layers all"):
        args = fairseq.parse(f"fast_weight_lm_{arch}", flags)
        args.init_std = None  # nothing to draw
        words = dictionaries[arch.split("_")[0]]
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        with torch.device("meta"):
            return FastWeightLanguageModel.build_model(args, task), args

    return build


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", GPT2)
def test_gpt2_is_a_pre_norm_transformer_with_learned_positions(on_meta, size):
    model, args = on_meta(f"gpt2_{size}")
    decoder, (layers, width, heads, parameters) = model.decoder, GPT2[size]
    # More than the source: rows of 3 symbols that it has not, and of positions, two that fairseq leaves empty.
    assert count(model) - (3 + 2) * width == parameters
    assert decoder.embed_scale == 1 and decoder.embed_positions.max_positions == 1024 == decoder.max_positions()
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    assert decoder.layer_norm is not None and args.activation_fn == "gelu_accurate"
    assert (len(decoder.layers), args.dropout, args.attention_dropout) == (layers, 0.1, 0.1)
    for layer in decoder.layers:
        attention = layer.self_attn
        assert attention.rotary_dim == 0 and layer.normalize_before and attention.q_proj.bias is not None
        assert (attention.embed_dim, attention.num_heads) == (width, heads)


@pytest.mark.parametrize("size", PYTHIA)
def test_pythia_is_parallel_and_rotary(on_meta, size):
    model, args = on_meta(f"pythia_{size}")
    decoder, (layers, width, heads, parameters) = model.decoder, PYTHIA[size]
    assert count(model) - (3 + 3) * width == parameters
    assert decoder.embed_scale == 1 and decoder.embed_positions is None and decoder.max_positions() == 2048
    assert decoder.output_projection.weight is not decoder.embed_tokens.weight
    assert decoder.output_projection.bias is None and decoder.layer_norm is not None and args.activation_fn == "gelu"
    assert (len(decoder.layers), args.dropout, args.attention_dropout) == (layers, 0, 0)
    for layer in decoder.layers:
        assert isinstance(layer, ParallelDecoderLayer) and isinstance(layer.self_attn, SoftmaxAttention)
        # A quarter of each head is turned.
        assert (layer.self_attn.num_heads, layer.self_attn.rotary_dim) == (heads, width // heads // 4)
        assert layer.self_attn.q_proj.bias is not None and layer.fc1.out_features == 4 * width


@pytest.mark.parametrize("size", RETNET)
def test_retnet_is_pythia_with_retention(on_meta, size):
    source, heads, parameters = RETNET[size]
    layers, width, of_source, of_pythia = PYTHIA[source]
    model, args = on_meta(f"retnet_{size}", "")
    assert len(model.decoder.layers) == layers and args.activation_fn == "gelu"
    for layer in model.decoder.layers:
        attention = layer.self_attn
        assert isinstance(layer, ParallelDecoderLayer) and isinstance(attention, Retention)
        assert (attention.num_heads, attention.head_dim) == (heads, 256)
        assert (attention.embed_dim, layer.fc1.out_features) == (width, 4 * width)
    # A gate of width x width with its biases for each layer.
    assert count(model) - 2 * 3 * width == of_pythia + layers * (width * width + width) == parameters
    # In a hybrid softmax attention has the source's heads.
    hybrid, _ = on_meta(f"retnet_{size}", f"--softmax-attention-layers 2,{layers // 2}")
    attentions = [layer.self_attn for layer in hybrid.decoder.layers]
    softmax = {i + 1: a for i, a in enumerate(attentions) if isinstance(a, SoftmaxAttention)}
    assert set(softmax) == {2, layers // 2}
    assert {(a.num_heads, a.rotary_dim) for a in softmax.values()} == {(of_source, width // of_source // 4)}
    assert {a.num_heads for a in attentions if isinstance(a, Retention)} == {heads}


@pytest.mark.parametrize("arch", ["fast_weight_lm_gpt2_small", "fast_weight_lm_retnet_430m"])
def test_fast_weights_stand_where_attention_was(fairseq, text, arch):
    tiny = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2"
    model = fairseq.build(f"{tiny} --softmax-attention-layers 2 --rotary-dim 4", arch=arch)
    first, second = (layer.self_attn for layer in model.decoder.layers)
    assert isinstance(first, MemoryAttention) and isinstance(second, SoftmaxAttention)
    full, state = model(text(2, 9))[0], {}
    steps = [model(text(2, 9)[:, :t], incremental_state=state)[0] for t in range(1, 10)]
    assert torch.allclose(torch.cat(steps, 1), full, atol=1e-4)
    full.softmax(-1).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_symbols_have_probability_0_and_others_share_it_all(fairseq, text, dtype):
    model, plain = (fairseq.build(flags).to(dtype) for flags in ("--mask-special-symbols", ""))
    log_probabilities = model.get_normalized_probs(model(text(2, 9)), log_probs=True)
    d = model.decoder.dictionary
    masked = torch.tensor([d.bos(), d.pad(), d.unk()])
    assert log_probabilities.isfinite().all()
    assert not log_probabilities.exp()[..., masked].any()
    logits = plain(text(2, 9))[0].float()
    logits[..., masked] = float("-inf")
    expected = logits.softmax(-1)
    assert torch.allclose(log_probabilities.exp(), expected, atol=1e-6)
    assert (expected[..., d.eos()] > 0).all()


def test_masked_symbols_leave_label_smoothing_finite_and_pass_no_gradient(fairseq, text):
    """It sums all log-probabilities, also with no smoothing, where the sum is multiplied by 0."""
    model = fairseq.build("--mask-special-symbols --share-decoder-input-output-embed")
    flat = model.get_normalized_probs(model(text(2, 9)), log_probs=True).flatten(0, 1)
    target = text(2, 9, seed=1).flatten()
    (plain, _), (loss, nll) = (label_smoothed_nll_loss(flat, target, e, ignore_index=1) for e in (0.0, 0.1))
    assert loss.isfinite() and nll.isfinite()
    assert torch.allclose(plain, -flat.gather(1, target[:, None]).sum())
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    model(text(1, 4))[0][..., model.decoder.dictionary.unk()].sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
