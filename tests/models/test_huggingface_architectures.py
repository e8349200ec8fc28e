"""The architectures of GPT-2 and Pythia have the sizes of their sources, and masked symbols have probability 0."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary

from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel

# Layers, width, heads, and the parameters of the published models.
GPT2 = {"small": (12, 768, 12, 124_439_808), "medium": (24, 1024, 16, 354_823_168)}
GPT2 |= {"large": (36, 1280, 20, 774_030_080), "xl": (48, 1600, 25, 1_557_611_200)}
PYTHIA = {"70m": (6, 512, 8, 70_426_624), "160m": (12, 768, 12, 162_322_944)}
PYTHIA |= {"410m": (24, 1024, 16, 405_334_016), "1b": (16, 2048, 8, 1_011_781_632)}
# Choi 2024, Table 1: the Pythia that it is but for retention, heads of that, parameters with 50,304 word types.
RETNET = {"430m": ("410m", 4, 430_524_416), "1b": ("1b", 8, 1_078_923_264)}


@pytest.fixture(scope="module")
def on_meta(fairseq):
    """`on_meta(arch)`: a model at full size, without memory for its weights, and its arguments."""
    dictionaries = Dictionary(), Dictionary()
    for words, size in zip(dictionaries, (50304, 50257), strict=True):
        for i in range(size - 1):  # </s> is one of the source's
            words.add_symbol(str(i))

    def build(arch: str, flags: str = "--softmax-attention-layers all"):
        args = fairseq.parse(f"fast_weight_lm_{arch}", flags)
        args.init_std = None  # nothing to draw
        words = dictionaries["gpt2" in arch]
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        with torch.device("meta"):
            return FastWeightLanguageModel.build_model(args, task), args

    return build


@pytest.mark.parametrize(("family", "size"), [*zip(["gpt2"] * 4 + ["pythia"] * 4, [*GPT2, *PYTHIA], strict=True)])
def test_gpt2_is_pre_norm_with_positions_and_pythia_parallel_and_rotary(on_meta, family, size):
    model, args = on_meta(f"{family}_{size}")
    decoder, gpt2 = model.decoder, family == "gpt2"
    layers, width, heads, parameters = (GPT2 if gpt2 else PYTHIA)[size]
    # More than the source: rows of 3 symbols that it has not, twice if untied, and 2 positions that it leaves empty.
    assert sum(p.numel() for p in model.parameters()) - (3 + (2 if gpt2 else 3)) * width == parameters
    assert decoder.embed_scale == 1 and decoder.max_positions() == (1024 if gpt2 else 2048)
    assert decoder.embed_positions.max_positions == 1024 if gpt2 else decoder.embed_positions is None
    assert (decoder.output_projection.weight is decoder.embed_tokens.weight) == gpt2
    assert decoder.output_projection.bias is None and decoder.layer_norm is not None
    assert args.activation_fn == ("gelu_accurate" if gpt2 else "gelu") and len(decoder.layers) == layers
    assert (args.dropout, args.attention_dropout) == ((0.1, 0.1) if gpt2 else (0, 0))
    for layer in decoder.layers:
        attention = layer.self_attn
        assert (layer.form == "parallel") != gpt2 and isinstance(attention, SoftmaxAttention)
        assert (attention.embed_dim, attention.num_heads, layer.fc1.out_features) == (width, heads, 4 * width)
        assert attention.rotary.dim == (0 if gpt2 else width // heads // 4)  # a quarter of each head is turned
        assert layer.normalize_before and attention.q_proj.bias is not None and attention.rotary.base == 10_000


@pytest.mark.parametrize("size", RETNET)
def test_retnet_is_pythia_with_retention(on_meta, size):
    source, heads, parameters = RETNET[size]
    layers, width, of_source, of_pythia = PYTHIA[source]
    model, args = on_meta(f"retnet_{size}", "")
    assert len(model.decoder.layers) == layers and args.activation_fn == "gelu"
    for layer in model.decoder.layers:
        attention = layer.self_attn
        assert layer.form == "parallel" and isinstance(attention, Retention)
        assert (attention.num_heads, attention.head_dim) == (heads, 256)
        assert (attention.embed_dim, layer.fc1.out_features) == (width, 4 * width)
    # A gate of width x width with its biases for each layer.
    assert (
        sum(p.numel() for p in model.parameters()) - 2 * 3 * width
        == of_pythia + layers * (width * width + width)
        == parameters
    )
    hybrid, _ = on_meta(f"retnet_{size}", f"--softmax-attention-layers 2,{layers // 2}")
    attentions = [layer.self_attn for layer in hybrid.decoder.layers]
    softmax = {i + 1: a for i, a in enumerate(attentions) if isinstance(a, SoftmaxAttention)}
    assert set(softmax) == {2, layers // 2}
    assert {(a.num_heads, a.rotary.dim) for a in softmax.values()} == {(of_source, width // of_source // 4)}
    assert {a.num_heads for a in attentions if isinstance(a, Retention)} == {heads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_symbols_have_probability_0_and_others_share_it_all(fairseq, text, dtype):
    model, plain = (fairseq.build(flags).to(dtype) for flags in ("--mask-special-symbols", ""))
    log_probabilities = model.get_normalized_probs(model(text(2, 9)), log_probs=True)
    d, logits = model.decoder.dictionary, plain(text(2, 9))[0].float()
    masked = torch.tensor([d.bos(), d.pad(), d.unk()])
    assert log_probabilities.isfinite().all() and not log_probabilities.exp()[..., masked].any()
    expected = logits.index_fill(-1, masked, float("-inf")).softmax(-1)
    assert torch.allclose(log_probabilities.exp(), expected, atol=1e-6) and (expected[..., d.eos()] > 0).all()
    # Label smoothing sums all log-probabilities, also with no smoothing, where the sum is multiplied by 0.
    flat, target = log_probabilities.flatten(0, 1), text(2, 9, seed=1).flatten()
    (unsmoothed, _), (loss, nll) = (label_smoothed_nll_loss(flat, target, e, ignore_index=1) for e in (0.0, 0.1))
    assert loss.isfinite() and nll.isfinite() and torch.allclose(unsmoothed, -flat.gather(1, target[:, None]).sum())
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    model(text(1, 4))[0][..., d.unk()].sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
