"""The architectures of GPT-2 and Pythia have the sizes of their sources, and masked symbols have probability 0."""

from __future__ import annotations

from functools import cache
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

GPT2 = {
    "small": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}
# As in their config.json's; all with a quarter of each head turned, and 2,048 positions.
PYTHIA = {
    "70m": {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "160m": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "410m": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    "1b": {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 8, "intermediate_size": 8192},
}
# Of the published models, and with what the papers call them.
PUBLISHED = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "pythia_70m": 70_426_624,
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "pythia_1b": 1_011_781_632,
}
ALL = "--softmax-attention-layers all"
TINY = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2"


def dictionary(words: int) -> Dictionary:
    made = Dictionary()
    for i in range(words):
        made.add_symbol(str(i))
    return made


@pytest.fixture(scope="module")
def on_meta(fairseq):
    """Models at full size, without memory for their weights. They are only looked at: each is made once."""
    symbols = {words: dictionary(words - 1) for words in (50257, 50304)}  # </s> is one of the source's

    @cache
    def build(arch: str, flags: str = ALL):
        args = fairseq.parse(arch, flags)
        args.init_std = None  # nothing to draw
        words = symbols[50257 if "gpt2" in arch else 50304]
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        with torch.device("meta"):
            return FastWeightLanguageModel.build_model(fairseq.configuration(args), task), args

    return build


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_sources(on_meta, name):
    model, args = on_meta(f"fast_weight_lm_{name}")
    # What ours has more: rows of 3 symbols that the source has not, and of positions, two that fairseq leaves empty.
    more = (3 + (2 if "gpt2" in name else 3)) * args.decoder_embed_dim
    assert count(model) - more == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_small", "pythia_70m"])
def test_published_numbers_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        if name == "gpt2_small":
            theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2["small"]))
        else:
            theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**PYTHIA["70m"], vocab_size=50304))
    assert count(theirs) == PUBLISHED[name]


@pytest.mark.parametrize("size", GPT2)
def test_gpt2_is_a_pre_norm_transformer_with_learned_positions(on_meta, size):
    model, args = on_meta(f"fast_weight_lm_gpt2_{size}")
    decoder, sizes = model.decoder, GPT2[size]
    assert decoder.embed_scale == 1 and decoder.embed_positions.max_positions == 1024 == decoder.max_positions()
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    assert decoder.layer_norm is not None and args.activation_fn == "gelu_accurate"
    assert (len(decoder.layers), args.dropout, args.attention_dropout) == (sizes["n_layer"], 0.1, 0.1)
    for layer in decoder.layers:
        attention = layer.self_attn
        assert attention.rotary_dim == 0 and layer.normalize_before and attention.q_proj.bias is not None
        assert (attention.embed_dim, attention.num_heads) == (sizes["n_embd"], sizes["n_head"])


@pytest.mark.parametrize("size", PYTHIA)
def test_pythia_is_parallel_and_rotary(on_meta, size):
    model, args = on_meta(f"fast_weight_lm_pythia_{size}")
    decoder, sizes = model.decoder, PYTHIA[size]
    assert decoder.embed_scale == 1 and decoder.embed_positions is None and decoder.max_positions() == 2048
    assert decoder.output_projection.weight is not decoder.embed_tokens.weight
    assert decoder.output_projection.bias is None and decoder.layer_norm is not None and args.activation_fn == "gelu"
    assert (len(decoder.layers), args.dropout, args.attention_dropout) == (sizes["num_hidden_layers"], 0, 0)
    heads, head_dim = sizes["num_attention_heads"], sizes["hidden_size"] // sizes["num_attention_heads"]
    for layer in decoder.layers:
        assert isinstance(layer, ParallelDecoderLayer) and isinstance(layer.self_attn, SoftmaxAttention)
        assert (layer.self_attn.num_heads, layer.self_attn.rotary_dim) == (heads, head_dim // 4)
        assert layer.self_attn.q_proj.bias is not None and layer.fc1.out_features == sizes["intermediate_size"]


# Choi 2024, Table 1: layers, width, between, heads of retention; and Pythia's heads, in layers of a hybrid.
RETNET = {"430m": (24, 1024, 4096, 4, 16), "1b": (16, 2048, 8192, 8, 8)}
# With 50,304 word types and 3 special ones, in a model whose embeddings are not tied.
RETNET_PARAMETERS = {"430m": 430_524_416, "1b": 1_078_923_264}


@pytest.mark.parametrize("size", RETNET)
def test_retnet_is_pythia_with_retention(on_meta, size):
    model, args = on_meta(f"fast_weight_lm_retnet_{size}", "")
    layers, width, between, heads, _ = RETNET[size]
    assert len(model.decoder.layers) == layers and args.activation_fn == "gelu"
    for layer in model.decoder.layers:
        attention = layer.self_attn
        assert isinstance(layer, ParallelDecoderLayer) and isinstance(attention, Retention)
        assert (attention.num_heads, attention.head_dim) == (heads, 256)
        assert (attention.embed_dim, layer.fc1.out_features) == (width, between)
    # Pythia's, a gate of width x width with its biases for each layer.
    pythia = PUBLISHED["pythia_410m" if size == "430m" else "pythia_1b"]
    gates = layers * (width * width + width)
    special = 2 * 3 * width
    assert count(model) - special == pythia + gates == RETNET_PARAMETERS[size]


@pytest.mark.parametrize("size", RETNET)
def test_hybrids_keep_the_sources_heads(on_meta, size):
    layers, width, _, heads, of_source = RETNET[size]
    flags = f"--softmax-attention-layers 2,{layers // 2}"
    model, _ = on_meta(f"fast_weight_lm_retnet_{size}", flags)
    attentions = [layer.self_attn for layer in model.decoder.layers]
    softmax = {i + 1: a for i, a in enumerate(attentions) if isinstance(a, SoftmaxAttention)}
    assert set(softmax) == {2, layers // 2}
    assert {(a.num_heads, a.rotary_dim) for a in softmax.values()} == {(of_source, width // of_source // 4)}
    assert {a.num_heads for a in attentions if isinstance(a, Retention)} == {heads}


@pytest.mark.parametrize(
    "arch", ["fast_weight_lm_gpt2_small", "fast_weight_lm_pythia_70m", "fast_weight_lm_retnet_430m"]
)
def test_fast_weights_stand_where_attention_was(fairseq, text, arch):
    model = fairseq.build(f"{TINY} --softmax-attention-layers 2 --rotary-dim 4", arch=arch)
    first, second = (layer.self_attn for layer in model.decoder.layers)
    assert isinstance(first, MemoryAttention) and isinstance(second, SoftmaxAttention)
    if "gpt2" not in arch:
        assert all(isinstance(layer, ParallelDecoderLayer) for layer in model.decoder.layers)
    full = model(text(2, 9))[0]
    state: dict = {}
    steps = [model(text(2, 9)[:, :t], incremental_state=state)[0] for t in range(1, 10)]
    assert torch.allclose(torch.cat(steps, 1), full, atol=1e-4)
    full.softmax(-1).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_retnet_without_retention_is_pythia(fairseq):
    saved = fairseq.build(f"{TINY} {ALL} --rotary-dim 4", arch="fast_weight_lm_pythia_70m")
    model = fairseq.build(f"{TINY} {ALL} --rotary-dim 4", arch="fast_weight_lm_retnet_430m", seed=1)
    model.load_state_dict(saved.state_dict())


# ------------------------------------------------------------------------------------- heads of fast weights


def test_fast_weight_layers_can_have_heads_of_their_own(fairseq):
    model = fairseq.build("--fast-weight-heads 4 --softmax-attention-layers 2")
    assert [layer.self_attn.num_heads for layer in model.decoder.layers] == [4, 2]
    same = fairseq.build("--fast-weight-heads 2", seed=1)
    same.load_state_dict(fairseq.build().state_dict())


def test_a_checkpoint_with_other_heads_does_not_fit(fairseq):
    """Parameters of the same shapes: nothing else would notice."""
    flags = "--update-rule sum --feature-map dpfp --dpfp-nu 2 --fast-weight-heads 4"
    model, again = fairseq.build(flags), fairseq.build(flags, seed=1)
    saved = fairseq.build("--update-rule sum --feature-map dpfp --dpfp-nu 1").state_dict()
    ours = model.state_dict()
    assert {n: x.shape for n, x in saved.items() if "settings" not in n} == {
        n: x.shape for n, x in ours.items() if "settings" not in n
    }
    with pytest.raises(
        ValueError, match="does not fit the model: sum fast weight heads is None in the checkpoint and 4 in"
    ):
        model.load_state_dict(saved)
    again.load_state_dict(ours)


@pytest.mark.parametrize("heads", [0, -2, 3, 32])
def test_heads_that_do_not_divide_the_width_are_refused(fairseq, heads):
    with pytest.raises(
        ValueError, match=f"fast_weight_heads is {heads}; it must be a divisor of decoder_embed_dim, 16"
    ):
        fairseq.build(f"--fast-weight-heads {heads}")


# --------------------------------------------------------------------------------------- masked symbols


def probabilities(fairseq, text, dtype=torch.float32):
    model = fairseq.build("--mask-special-symbols").to(dtype)
    return model, model.get_normalized_probs(model(text(2, 9)), log_probs=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_symbols_have_probability_0_and_others_share_it_all(fairseq, text, dtype):
    model, log_probabilities = probabilities(fairseq, text, dtype)
    plain = fairseq.build("").to(dtype)
    d = model.decoder.dictionary
    masked = torch.tensor([d.bos(), d.pad(), d.unk()])
    assert log_probabilities.isfinite().all()
    assert not log_probabilities.exp()[..., masked].any()
    logits = plain(text(2, 9))[0].float()
    logits[..., masked] = float("-inf")
    expected = logits.softmax(-1)
    assert torch.allclose(log_probabilities.exp(), expected, atol=1e-6)
    assert (expected[..., d.eos()] > 0).all()


def test_label_smoothing_stays_finite(fairseq, text):
    """The sum over all log-probabilities, also with no smoothing, where it is multiplied by 0."""
    model, log_probabilities = probabilities(fairseq, text)
    flat, target = log_probabilities.flatten(0, 1), text(2, 9, seed=1).flatten()
    losses = {}
    for epsilon in (0.0, 0.1):
        loss, nll = label_smoothed_nll_loss(flat, target, epsilon, ignore_index=1)
        assert loss.isfinite() and nll.isfinite()
        losses[epsilon] = loss
    assert torch.allclose(losses[0.0], -flat.gather(1, target[:, None]).sum())
    losses[0.1].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_masked_logits_pass_no_gradient(fairseq, text):
    model = fairseq.build("--mask-special-symbols --share-decoder-input-output-embed")
    model(text(1, 4))[0][..., model.decoder.dictionary.unk()].sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_an_adaptive_softmax_has_nothing_to_mask(fairseq):
    with pytest.raises(ValueError, match="mask_special_symbols is set and adaptive_softmax_cutoff is '10,20'"):
        fairseq.build("--mask-special-symbols --adaptive-softmax-cutoff 10,20")


# --------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--rotary-dim 4", "rotary dim is None in the checkpoint and 4 in the model"),
        ("--parallel-residual --decoder-normalize-before", "parallel residual is None"),
    ],
)
def test_a_checkpoint_without_these_does_not_fit(fairseq, flags, named):
    """They have no parameters: nothing else would notice."""
    before = "--decoder-normalize-before" if "before" in flags else ""
    saved = fairseq.build(f"{ALL} {before}")
    with pytest.raises(ValueError, match=named):
        fairseq.build(f"{ALL} {flags}").load_state_dict(saved.state_dict())
    again = fairseq.build(f"{ALL} {flags}")
    again.load_state_dict(fairseq.build(f"{ALL} {flags}", seed=2).state_dict())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rotary-dim 3", "rotary_dim is 3; it must be an even number from 2 to the head dim, 8"),
        ("--rotary-dim 10", "rotary_dim is 10"),
        ("--parallel-residual", "parallel_residual is set; it needs decoder_normalize_before"),
    ],
)
def test_bad_options_are_named(fairseq, flags, message):
    with pytest.raises(ValueError, match=message):
        fairseq.build(f"{ALL} {flags}")
