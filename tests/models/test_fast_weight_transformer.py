"""The translation model: whole, token by token, alone and in a batch; fairseq's Transformer with softmax; its sizes."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq import options as fairseq_options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.fast_weight_source_attention import FastWeightSourceAttention
from fairseq_fastweights.mixers.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.linear_attention import LinearAttention
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from fairseq_fastweights.models.fast_weight_transformer import parse_places
from tests.models.translation import PAD, PLACES, SCORES, SUBSETS, batch, build, log_probs, sentences, shifted, with_map
from tests.ops.agreement import assert_close, relative_error

LENGTHS, TARGET_LENGTHS = (5, 9, 1, 7), (6, 4, 8, 8)
SAME = 1e-6  # the same operations in the same order, but for kernels that are chosen by layout
# fairseq's options that change the model around the attention. Each has to mean the same as there.
OPTIONS: dict[str, dict[str, Any]] = {
    "base": {},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "learned positions": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "no positions": {"no_token_positional_embeddings": True},
    "one embedding": {"share_all_embeddings": True, "no_scale_embedding": True},
    "tied": {"share_decoder_input_output_embed": True},
    "other widths": {"encoder_embed_dim": 24, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 20},
    "other widths in and out": {"decoder_input_dim": 12, "decoder_output_dim": 20},
    "other heads": {"encoder_attention_heads": 4, "decoder_attention_heads": 1},
    "gelu, embedding norm": {"activation_fn": "gelu", "layernorm_embedding": True},
    "adaptive": {"adaptive_softmax_cutoff": "8,16"},
    "checkpointed": {"checkpoint_activations": True},
    "layers dropped": {"encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4},
    "layers pruned": {"encoder_layers_to_keep": "1", "decoder_layers_to_keep": "0,1"},
    "no cross attention": {"no_cross_attention": True},
    "one attention": {"no_cross_attention": True, "cross_self_attention": True},
    "one attention, and cross": {"cross_self_attention": True},
}
CHOICES = [*SUBSETS, *["encoder,decoder,cross", "decoder,cross"] * 3, "encoder", "encoder,cross"]
NAMES = [*list(OPTIONS)[:14], "one attention", "one attention, and cross"]
CASES = list(zip(CHOICES, cycle([*UPDATE_RULES, "retention"]), cycle(FEATURE_MAPS), NAMES, strict=False))


def example(left_pad: bool = True) -> dict[str, torch.Tensor]:
    """Four sentence pairs of mixed lengths, one of them with an empty source."""
    return {**batch(sentences(LENGTHS), left_pad), "prev_output_tokens": shifted(sentences(TARGET_LENGTHS, seed=1))}


REAL = example()["prev_output_tokens"] != PAD


def scores(model: Any, net_output: Any) -> torch.Tensor:
    return model.get_normalized_probs(net_output, log_probs=True)


def token_by_token(model: Any, prev_output_tokens: torch.Tensor, **source: torch.Tensor) -> torch.Tensor:
    """As the sequence generator asks: the whole prefix every time, and a state."""
    encoder_out, incremental, steps = model.encoder(**source), {}, []
    for t in range(prev_output_tokens.shape[1]):
        out = model.decoder(prev_output_tokens[:, : t + 1], encoder_out=encoder_out, incremental_state=incremental)
        assert out[0].shape[1] == 1
        steps.append(scores(model, out))
    return torch.cat(steps, dim=1)


def train_step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The loss of a batch, in training, and the gradient of every parameter."""
    model.train()
    torch.manual_seed(3)
    target = shifted(sentences(TARGET_LENGTHS, seed=1)).roll(-1, dims=1)
    loss = F.nll_loss(scores(model, model(**example())).flatten(0, 1), target.flatten(), ignore_index=PAD)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("places", "rule", "feature_map", "name"), CASES)
@torch.no_grad()
def test_scores_are_the_same_token_by_token_and_alone(places, rule, feature_map, name):
    model = with_map(feature_map, fast_weight_attention=places, update_rule=rule, **OPTIONS[name])
    for left_pad in (True, False):
        inputs = example(left_pad)
        whole = scores(model, model(**inputs))
        assert (token_by_token(model, **inputs) - whole)[REAL].abs().max() <= SCORES
        for row, pair in enumerate(zip(sentences(LENGTHS), sentences(TARGET_LENGTHS, seed=1), strict=True)):
            in_batch = whole[row, : len(pair[1])].gather(-1, pair[1][:, None])[:, 0]
            assert (in_batch - log_probs(model, *pair)).abs().max() <= SCORES, f"row {row}"
    # The source is read, and of the target nothing that follows.
    other = scores(model, model(**{**inputs, **batch(sentences(LENGTHS, seed=2))}))
    assert (other - whole).abs().max() > 1e-3
    changed = inputs["prev_output_tokens"].index_fill(1, torch.arange(4, 8), 7)
    later = scores(model, model(**{**inputs, "prev_output_tokens": changed}))
    assert relative_error(later[:, :4], whole[:, :4]) <= SAME  # rounding of sums that share a block
    assert relative_error(later[:, 4:], whole[:, 4:]) > 0.01


@pytest.mark.parametrize("name", OPTIONS)
def test_without_fast_weights_it_is_fairseqs_transformer(name):
    theirs = build("transformer", **OPTIONS[name])
    ours = build(fast_weight_attention="none", seed=1, **OPTIONS[name])
    for model in (theirs, ours):  # both, as fairseq switches its fused kernel on in loading
        model.load_state_dict(theirs.state_dict(), strict=True)
    with torch.no_grad():
        written = [token_by_token(model, **example()) for model in (ours, theirs)]
    assert relative_error(*written) <= SAME
    for training in (False, True):
        outputs = []
        for model in (ours, theirs):
            model.train(training)
            torch.manual_seed(3)  # of dropout
            outputs.append(scores(model, model(**example()))[REAL])
        assert relative_error(*outputs) <= SAME
    if name != "adaptive":  # fairseq's adaptive softmax takes another way in training
        (loss, grads), (expected_loss, expected) = train_step(ours), train_step(theirs)
        assert relative_error(loss, expected_loss) <= SAME
        assert_close(grads, expected, 1e-5, vanishing=1e-6)  # that of a key's bias is nothing but rounding


@pytest.mark.parametrize("places", SUBSETS)
def test_attention_is_fast_weight_where_it_is_said_and_nowhere_else(places):
    aligned = {"criterion": "label_smoothed_cross_entropy_with_alignment"}  # which needs a task with alignments
    model, inputs = build(fast_weight_attention=places, update_rule="gated", **aligned), example()
    for module in model.modules():
        if isinstance(module, LinearAttention):  # the map that is left out is that of the rule's paper
            assert module.feature_map_name == ("identity" if isinstance(module, FastWeightAttention) else "elu")
    kinds = dict(zip(PLACES, (FastWeightSourceAttention, FastWeightAttention, FastWeightSourceAttention), strict=True))
    encoder, decoder, cross = (kind if place in places else MultiheadAttention for place, kind in kinds.items())
    assert all(type(layer.self_attn) is encoder for layer in model.encoder.layers)
    assert all((type(x.self_attn), type(x.encoder_attn)) == (decoder, cross) for x in model.decoder.layers)
    whole = {"encoder_out": model.encoder(inputs["src_tokens"]), "full_context_alignment": True}
    refused = pytest.raises(ValueError, match="full_context_alignment must be False")
    with refused if "decoder" in places else nullcontext():
        model.decoder(inputs["prev_output_tokens"], **whole)
    assert parse_places(f" {','.join(reversed(places.split(',')))} ,") == set(places.split(",")) - {"none"}
    attention = (model(**inputs)[1]["attn"] or [None])[0]
    assert (attention is None) == ("cross" in places)  # only softmax has weights to align words by
    values = ("print_alignment", "hard"), ("replace_unk", ""), ("print_alignment", None), ("print_alignment", False)
    for option, value in (*values, ("other", "")):
        settings = FairseqConfig()
        setattr(settings.generation, option, value)
        refused = "cross" in places and value not in (None, False) and option != "other"
        with pytest.raises(ValueError, match=f"^{option} is '{value}'; it must") if refused else nullcontext():
            model.prepare_for_inference_(settings)


def test_flags_reach_every_attention():
    flags = """data --arch fast_weight_transformer_tiny --update-rule delta --feature-map dpfp --dpfp-nu 2
        --scale-read-out --normalization sum,attention --share-all-embeddings --encoder-layers 3
        --attention-dropout 0.2 --quant-noise-pq 0.1 --fast-weight-backend reference"""
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser("translation"), flags.split())
    words = build().encoder.dictionary
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, task)
    assert len(model.encoder.layers) == 3 and model.decoder.embed_tokens is model.encoder.embed_tokens
    modules = {name: module for name, module in model.named_modules() if isinstance(module, LinearAttention)}
    assert len(modules) == 3 + 2 * 2
    for name, module in modules.items():  # rule, normalisation and backend are the decoder's; map and scale, all's
        own = name.startswith("decoder") and name.endswith("self_attn")
        assert type(module) is (FastWeightAttention if own else FastWeightSourceAttention)
        assert module.normalization == {"attention", *(["sum"] if own else [])}
        if own:
            assert module.update_rule == "delta" and module.backend == "reference"
        assert (module.feature_map_name, module.settings()["feature dim"]) == ("dpfp", 128)
        assert module.scale == 32**-0.5 and module.dropout_module.p == 0.2
        assert all(x._forward_pre_hooks for x in module.children() if isinstance(x, torch.nn.Linear)), "no noise"


# Encoder and decoder layers, width, heads, feed-forward width, dropout; and fairseq's name for it.
ARCHITECTURES = {
    "fast_weight_transformer": (6, 512, 8, 2048, 0.1, "transformer"),
    "fast_weight_transformer_wmt_en_de_base": (6, 512, 8, 2048, 0.1, "transformer_wmt_en_de"),
    "fast_weight_transformer_wmt_en_de_big": (6, 1024, 16, 4096, 0.3, "transformer_vaswani_wmt_en_de_big"),
    "fast_weight_transformer_iwslt_de_en": (6, 512, 4, 1024, 0.1, "transformer_iwslt_de_en"),
    "fast_weight_transformer_multi30k_en_de": (4, 128, 4, 256, 0.3, None),
    "fast_weight_transformer_tiny": (2, 64, 2, 64, 0.1, "transformer_tiny"),
}


@pytest.mark.parametrize("arch", [x for x in ARCH_CONFIG_REGISTRY if x.startswith("fast_weight_transformer")])
def test_architectures_have_their_sizes_and_are_fairseqs(arch, monkeypatch):
    layers, width, heads, ffn, dropout, theirs = ARCHITECTURES[arch]
    monkeypatch.setattr("tests.models.translation.SIZES", {})
    with torch.device("meta"):  # without memory for the weights
        model, plain = build(arch), build(arch, fast_weight_attention="none")
        fairseqs = build(theirs) if theirs else plain
    for side in (model.encoder, model.decoder):
        assert (len(side.layers), side.dropout_module.p, side.embed_tokens.embedding_dim) == (layers, dropout, width)
        for layer in side.layers:
            assert (layer.fc1.in_features, layer.fc1.out_features) == (width, ffn)
            for attention in (layer.self_attn, getattr(layer, "encoder_attn", layer.self_attn)):
                assert isinstance(attention, LinearAttention) and attention.feature_map_name == "elu"
                assert (attention.embed_dim, attention.num_heads) == (width, heads)
    shapes = [{name: tuple(p.shape) for name, p in m.named_parameters()} for m in (plain, fairseqs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"fast_weight_attention": x}, f"^fast_weight_attention is {x!r}; .* none, or .* encoder, decoder, cross$")
            for x in (" ", "all", "encoder,self", "none,cross")
        ),
        ({"cross_self_attention": True, "fast_weight_attention": "decoder"}, "set and fast_weight_attention is 'decod"),
        ({"mixers": "delta:1"}, "mixers is 'delta:1', which leaves layers without a mixer: 2"),
        ({"mixers": "delta,mamba:2", "decoder_layers_to_keep": "0"}, "to_keep is '0' and mixers is 'delta,mamba:2'"),
        ({"update_rule": "hebb"}, "update_rule is 'hebb'; it must be one of sum, gated, "),
        ({"normalization": "removal"}, "the sum rule removes nothing"),
        ({"decoder_attention_heads": 3}, "^decoder_attention_heads is 3; it must be a divisor of decoder_embed_dim,"),
        ({"encoder_attention_heads": 5}, "^encoder_attention_heads is 5; it must be a divisor of encoder_embed_dim,"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize(("places", "learned"), [("encoder,decoder,cross", False), ("none", True)])
@torch.no_grad()
def test_sources_may_be_as_long_as_there_are_positions(places, learned):
    limits = {"max_source_positions": 8, "max_target_positions": 9}
    model = build(fast_weight_attention=places, encoder_learned_pos=learned, **limits)
    assert model.max_positions() == (8, 9)
    target = shifted(sentences([2, 2]))
    with pytest.raises(ValueError, match=r"^a source has 9 tokens; the model takes at most 8 \(--max-source-pos"):
        model(**batch(sentences([4, 9])), prev_output_tokens=target)
    inputs = batch(sentences([8, 3]))
    padded = {**inputs, "src_tokens": F.pad(inputs["src_tokens"], (5, 0), value=PAD)}  # which needs no position
    out, expected = (model(**x, prev_output_tokens=target)[0] for x in (padded, inputs))
    assert relative_error(out, expected) <= SCORES


@pytest.mark.slow
@torch.no_grad()
def test_torch_compile_computes_the_same():
    model, inputs = build(encoder_layers=1, decoder_layers=1), example()
    compiled = torch.compile(model, backend="aot_eager")  # without the compiler, which takes 15 s
    assert relative_error(compiled(**inputs)[0], model(**inputs)[0]) <= SCORES
