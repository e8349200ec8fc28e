"""The translation model gives the same numbers whole or token by token, alone or in a batch; with softmax attention it
is fairseq's Transformer, and its architectures have the sizes of the papers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq import options as fairseq_options
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.fast_weight_source_attention import FastWeightSourceAttention
from fairseq_fastweights.mixers.memory_attention import MemoryAttention
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from fairseq_fastweights.models.fast_weight_transformer import parse_places
from tests.models.translation import (
    EOS,
    FUSED,
    PAD,
    SCORES,
    SUBSETS,
    arguments,
    batch,
    build,
    dictionary,
    log_probs,
    relative_error,
    sentences,
    shifted,
    with_map,
)

LENGTHS = (5, 9, 1, 7)
TARGET_LENGTHS = (6, 4, 8, 8)

# The same operations in the same order; rounding may differ where kernels are chosen by layout.
SAME = 1e-6

# Rules are the decoder's: where it has none they make no difference.
# Each rule and each map with each choice of attention, and, over all of these, most pairs of them.
COMBINATIONS = [
    (places, rules[(number + offset) % len(rules)], maps[number % len(maps)])
    for offset, places in enumerate(SUBSETS)
    for rules in [list(UPDATE_RULES) if "decoder" in places else ["sum"]]
    for maps in [list(FEATURE_MAPS) if places != "none" else ["elu"]]
    for number in range(max(len(rules), len(maps)))
]


# fairseq's options that change what surrounds the attention. Each has to mean what it means there.
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
}
# The decoder attends to the source and to itself in one: with softmax only.
ONE_ATTENTION = {"no_cross_attention": True, "cross_self_attention": True}


def options(table: dict[str, dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("options", table.values(), ids=list(table))


def example(left_pad: bool = True) -> dict[str, torch.Tensor]:
    """Four sentence pairs of mixed lengths, one of them with an empty source."""
    return {
        **batch(sentences(LENGTHS), left_pad),
        "prev_output_tokens": shifted(sentences(TARGET_LENGTHS, seed=1)),
    }


def scores(model: Any, net_output: Any) -> torch.Tensor:
    return model.get_normalized_probs(net_output, log_probs=True)


def token_by_token(model: Any, prev_output_tokens: torch.Tensor, **source: torch.Tensor) -> torch.Tensor:
    """As the sequence generator asks: the whole prefix every time, and a state."""
    encoder_out, incremental = model.encoder(**source), {}
    steps = []
    for t in range(prev_output_tokens.shape[1]):
        out = model.decoder(prev_output_tokens[:, : t + 1], encoder_out=encoder_out, incremental_state=incremental)
        assert out[0].shape[1] == 1
        steps.append(scores(model, out))
    return torch.cat(steps, dim=1)


def worst(actual: torch.Tensor, expected: torch.Tensor, where: torch.Tensor) -> float:
    return (actual - expected)[where].abs().max().item()


def train_step(model: Any, seed: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The loss of a batch, in training, and the gradient of every parameter."""
    model.train()
    torch.manual_seed(seed)
    inputs, target = example(), shifted(sentences(TARGET_LENGTHS, seed=1)).roll(-1, dims=1)
    log_probabilities = scores(model, model(**inputs))
    loss = F.nll_loss(log_probabilities.flatten(0, 1), target.flatten(), ignore_index=PAD)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_steps(actual: Any, expected: Any) -> None:
    """Of `train_step`, with the same operations, of which gradients may be summed in another order."""
    (loss, grads), (expected_loss, expected_grads) = actual, expected
    assert relative_error(loss, expected_loss) <= SAME
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert (grads[name] is None) == (grad is None), name
        # In softmax attention a key's bias adds the same to all weights: its gradient is nothing but rounding.
        if grad is not None and not (name.endswith("k_proj.bias") and grad.abs().max() < 1e-7):
            assert relative_error(grads[name], grad) <= 1e-5, name


# ------------------------------------------------------------------------- whole, token by token


@pytest.mark.parametrize(("places", "rule", "feature_map"), COMBINATIONS, ids=["-".join(x) for x in COMBINATIONS])
@torch.no_grad()
def test_single_tokens_give_what_the_whole_target_gives(places, rule, feature_map):
    model, inputs = with_map(feature_map, fast_weight_attention=places, update_rule=rule), example()
    whole = scores(model, model(**inputs))
    assert worst(token_by_token(model, **inputs), whole, inputs["prev_output_tokens"] != PAD) <= SCORES
    # And the source is read.
    other = {**inputs, **batch(sentences(LENGTHS, seed=2))}
    assert (scores(model, model(**other)) - whole).abs().max() > 1e-3


@pytest.mark.parametrize("cross", [False, True], ids=["no cross", "cross"])
@torch.no_grad()
def test_one_attention_to_source_and_target_beside_fast_weights(cross):
    options = {"fast_weight_attention": "encoder,cross"} if cross else {"fast_weight_attention": "encoder"}
    model, inputs = build(**{**ONE_ATTENTION, **options, "no_cross_attention": not cross}), example()
    whole = scores(model, model(**inputs))
    assert worst(token_by_token(model, **inputs), whole, inputs["prev_output_tokens"] != PAD) <= SCORES


@pytest.mark.parametrize("rule", UPDATE_RULES)
@torch.no_grad()
def test_a_later_token_changes_no_earlier_score(rule):
    model, inputs = build(update_rule=rule), example()
    changed = {**inputs, "prev_output_tokens": inputs["prev_output_tokens"].clone()}
    changed["prev_output_tokens"][:, 4:] = 7
    out, other = model(**inputs)[0], model(**changed)[0]
    assert relative_error(other[:, :4], out[:, :4]) <= SAME  # rounding of sums that share a block
    assert relative_error(other[:, 4:], out[:, 4:]) > 0.01


@pytest.mark.parametrize("rule", UPDATE_RULES)
@torch.no_grad()
def test_the_state_grows_neither_with_the_target_nor_with_the_source(rule):
    model, sizes = build(update_rule=rule), set()
    for length in (3, 30):
        encoder_out, incremental = model.encoder(**batch(sentences([length, 2]))), {}
        for t in range(1, 6):
            model.decoder(torch.full((2, t), 5), encoder_out=encoder_out, incremental_state=incremental)
            buffers = [x for x in incremental.values() if isinstance(x, dict)]
            sizes.add(tuple(tuple(x.shape) for buffer in buffers for x in buffer.values()))
            assert len(buffers) == 4  # two layers: of the target, of the source
    assert len(sizes) == 1


@pytest.mark.parametrize("places", SUBSETS)
def test_only_softmax_attention_to_the_source_gives_weights(places):
    model = build(fast_weight_attention=places)
    attention = (model(**example())[1]["attn"] or [None])[0]
    assert (attention is None) == ("cross" in places)


# ------------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("left_pad", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@torch.no_grad()
def test_a_sentence_has_the_same_scores_alone_and_in_a_batch(feature_map, left_pad):
    model, inputs = with_map(feature_map), example(left_pad)
    together = scores(model, model(**inputs))
    pairs = zip(sentences(LENGTHS), sentences(TARGET_LENGTHS, seed=1), strict=True)
    for row, (source, target) in enumerate(pairs):
        in_batch = together[row, : len(target)].gather(-1, target[:, None])[:, 0]
        assert (in_batch - log_probs(model, source, target)).abs().max() <= SCORES, f"row {row}"


@pytest.mark.parametrize(("places", "rule"), [(x, "sum") for x in SUBSETS] + [(SUBSETS[0], x) for x in UPDATE_RULES])
@torch.no_grad()
def test_padding_changes_nothing_wherever_fast_weights_are(places, rule):
    names = ("base", "pre-norm", "learned positions", "no positions")
    options = OPTIONS[names[(SUBSETS.index(places) + list(UPDATE_RULES).index(rule)) % len(names)]]
    model = build(fast_weight_attention=places, update_rule=rule, **options)
    model.load_state_dict(model.state_dict())  # switches fairseq's fused kernel on, where there is one
    rows = sentences(LENGTHS)
    for left_pad in (True, False):
        together = model.encoder(**batch(rows, left_pad))
        out = together["encoder_out"][0]
        for row, source in enumerate(rows):
            real = ~together["encoder_padding_mask"][0][row]
            alone = model.encoder(**batch([source]))["encoder_out"][0][:, 0]
            assert relative_error(out[real, row], alone) <= SCORES, f"row {row}"


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_a_batch_with_an_empty_source_is_finite(feature_map):
    model = build(feature_map=feature_map)
    loss, grads = train_step(model)
    assert loss.isfinite() and all(grad.isfinite().all() for grad in grads.values())
    assert model.eval()(**batch(sentences([1])), prev_output_tokens=torch.tensor([[EOS]]))[0].isfinite().all()


# -------------------------------------------------------------------- fairseq's Transformer in it


@options({**OPTIONS, "one attention": ONE_ATTENTION})
def test_without_fast_weights_it_is_fairseqs_transformer(options):
    theirs = build("transformer", **options)
    ours = build(fast_weight_attention="none", seed=1, **options)
    for model in (theirs, ours):  # both, as fairseq switches its fused kernel on in loading
        model.load_state_dict(theirs.state_dict(), strict=True)
    real = example()["prev_output_tokens"] != PAD
    for training in (False, True):
        outputs = []
        for model in (theirs, ours):
            model.train(training)
            torch.manual_seed(3)  # of dropout
            outputs.append(scores(model, model(**example()))[real])
        assert relative_error(outputs[1], outputs[0]) <= SAME
    if "adaptive_softmax_cutoff" not in options:  # fairseq's adaptive softmax takes another way in training
        assert_same_steps(train_step(ours), train_step(theirs))


@torch.no_grad()
def test_without_fast_weights_it_generates_as_fairseqs_transformer():
    theirs = build("transformer")
    ours = build(fast_weight_attention="none", seed=1)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(theirs.state_dict())
    assert worst(token_by_token(ours, **example()), token_by_token(theirs, **example()), ...) <= SAME


@pytest.mark.parametrize("places", SUBSETS)
def test_attention_is_fast_weight_where_it_is_said_and_nowhere_else(places):
    model = build(fast_weight_attention=places)
    for layer in model.encoder.layers:
        assert type(layer.self_attn) is (FastWeightSourceAttention if "encoder" in places else MultiheadAttention)
    for layer in model.decoder.layers:
        assert type(layer.self_attn) is (FastWeightAttention if "decoder" in places else MultiheadAttention)
        assert type(layer.encoder_attn) is (FastWeightSourceAttention if "cross" in places else MultiheadAttention)


def test_the_rule_and_the_normalisation_are_the_decoders():
    model = build(update_rule="delta", normalization="sum,attention", feature_map="dpfp", scale_read_out=True)
    for name, module in model.named_modules():
        if isinstance(module, MemoryAttention):
            own = name.startswith("decoder") and name.endswith("self_attn")
            assert type(module) is (FastWeightAttention if own else FastWeightSourceAttention)
            assert module.normalization == {"attention", *(["sum"] if own else [])}
            # The map, its size and the scale are those of all three.
            assert module.feature_map_name == "dpfp" and module.scale == 8**-0.5


def test_the_map_that_is_left_out_is_that_of_the_rules_paper():
    model = build(update_rule="gated")
    assert model.decoder.layers[0].self_attn.feature_map_name == "identity"
    assert model.decoder.layers[0].encoder_attn.feature_map_name == "elu"
    assert model.encoder.layers[0].self_attn.feature_map_name == "elu"


def test_settings_reach_every_attention():
    model = build(
        feature_map="favor",
        favor_features=3,
        attention_dropout=0.2,
        quant_noise_pq=0.1,
        fast_weight_backend="reference",
    )
    modules = [module for module in model.modules() if isinstance(module, MemoryAttention)]
    assert len(modules) == 6
    for module in modules:
        assert module.feature_map.output_dim == 6 and module.dropout_module.p == 0.2
        assert all(projection._forward_pre_hooks for projection in (module.q_proj, module.out_proj)), "no noise"
    assert all(layer.self_attn.backend == "reference" for layer in model.decoder.layers)


# ----------------------------------------------------------------------------------- training


@pytest.mark.parametrize(("places", "rule"), [(x, "gated") for x in SUBSETS] + [(SUBSETS[0], x) for x in UPDATE_RULES])
def test_every_parameter_is_trained(places, rule):
    model = build(fast_weight_attention=places, update_rule=rule, feature_map="relu")
    _, grads = train_step(model)
    unused = {name for name, grad in grads.items() if grad is None}
    # fairseq's own layers have copies that it does not train either.
    theirs = {f"encoder.layers.{layer}.{name}" for layer in (0, 1) for name in FUSED}
    assert unused == (set() if "encoder" in places else theirs)
    for name, grad in grads.items():
        memory = isinstance(model.get_submodule(name.rpartition(".")[0].rpartition(".")[0]), MemoryAttention)
        if grad is not None:
            assert grad.isfinite().all(), name
            assert not memory or grad.any(), name


@pytest.mark.parametrize(
    ("feature_map", "dtype"),
    [("elu", torch.bfloat16), ("elu", torch.float16), ("favor", torch.bfloat16), ("dpfp", torch.float16)],
)
def test_half_types_are_finite_and_near_float32(feature_map, dtype):
    low, exact = (build(feature_map=feature_map, dropout=0.0) for _ in range(2))
    low = low.to(dtype)
    exact.load_state_dict(low.state_dict())  # the same numbers, rounded
    inputs, real = example(), example()["prev_output_tokens"] != PAD
    with torch.no_grad():
        out, expected = low(**inputs)[0], exact(**inputs)[0]
        assert out.dtype == dtype
        # Some sixty roundings to 2^-9 through four layers: near 1 % where they add up at random.
        assert relative_error(out[real], expected[real]) <= 0.03
        single = token_by_token(low, **inputs)[real].exp()
        assert (single - scores(exact, (expected, None))[real].exp()).abs().max() <= 0.03
    loss, grads = train_step(low)
    assert loss.isfinite() and all(grad.isfinite().all() for grad in grads.values())
    if feature_map != "favor":  # which draws anew in training
        assert loss.item() == pytest.approx(train_step(exact)[0].item(), rel=0.03)


# ------------------------------------------------------------------------------ architectures

# encoder and decoder layers, width, heads, feed-forward width, dropout
ARCHITECTURES = {
    "fast_weight_transformer": (6, 512, 8, 2048, 0.1),
    "fast_weight_transformer_wmt_en_de_base": (6, 512, 8, 2048, 0.1),
    "fast_weight_transformer_wmt_en_de_big": (6, 1024, 16, 4096, 0.3),
    "fast_weight_transformer_iwslt_de_en": (6, 512, 4, 1024, 0.1),
    "fast_weight_transformer_multi30k_en_de": (4, 128, 4, 256, 0.3),
    "fast_weight_transformer_tiny": (2, 64, 2, 64, 0.1),
}


def on_meta(arch: str, **options: Any) -> Any:
    """A model without memory for its weights."""
    words = dictionary()
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    with torch.device("meta"):
        return ARCH_MODEL_REGISTRY[arch].build_model(arguments(arch, **options), task)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architectures_have_their_sizes(arch):
    layers, width, heads, ffn, dropout = ARCHITECTURES[arch]
    model = on_meta(arch)
    for side in (model.encoder, model.decoder):
        assert len(side.layers) == layers
        assert side.dropout_module.p == dropout
        assert side.embed_tokens.embedding_dim == width
        for layer in side.layers:
            assert (layer.fc1.in_features, layer.fc1.out_features) == (width, ffn)
            for attention in (layer.self_attn, getattr(layer, "encoder_attn", layer.self_attn)):
                assert isinstance(attention, MemoryAttention) and attention.feature_map_name == "elu"
                assert (attention.embed_dim, attention.num_heads) == (width, heads)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("fast_weight_transformer", "transformer"),
        ("fast_weight_transformer_wmt_en_de_big", "transformer_vaswani_wmt_en_de_big"),
        ("fast_weight_transformer_iwslt_de_en", "transformer_iwslt_de_en"),
        ("fast_weight_transformer_tiny", "transformer_tiny"),
    ],
)
def test_without_fast_weights_architectures_are_fairseqs(ours, theirs):
    shapes = [
        {name: tuple(p.shape) for name, p in model.named_parameters()}
        for model in (on_meta(ours, fast_weight_attention="none"), on_meta(theirs))
    ]
    assert shapes[0] == shapes[1]


def test_every_architecture_of_ours_is_in_the_table():
    assert {arch for arch in ARCH_CONFIG_REGISTRY if arch.startswith("fast_weight_transformer")} == set(ARCHITECTURES)


# --------------------------------------------------------------------------------- command line


def parse(*flags: str) -> Any:
    parser = fairseq_options.get_training_parser("translation")
    return fairseq_options.parse_args_and_arch(parser, ["data", "--arch", "fast_weight_transformer_tiny", *flags])


def test_flags_reach_the_model():
    flags = "--fast-weight-attention cross,decoder --update-rule delta --feature-map dpfp --dpfp-nu 2 --scale-read-out"
    args = parse(*flags.split(), "--normalization", "sum,attention", "--share-all-embeddings", "--encoder-layers", "3")
    words = dictionary()
    model = ARCH_MODEL_REGISTRY[args.arch].build_model(
        args, SimpleNamespace(source_dictionary=words, target_dictionary=words)
    )
    assert len(model.encoder.layers) == 3 and isinstance(model.encoder.layers[0].self_attn, MultiheadAttention)
    attention = model.decoder.layers[0].self_attn
    settings = attention.settings()
    assert attention.update_rule == "delta" and settings["feature dim"] == 128
    assert settings["normalization"] == "attention,sum" and settings["read-out scale"] == 32**-0.5
    assert model.decoder.embed_tokens is model.encoder.embed_tokens


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("none", set()),
        ("encoder", {"encoder"}),
        (" cross , decoder ", {"cross", "decoder"}),
        ("encoder,encoder", {"encoder"}),
        ("cross,", {"cross"}),
        ("encoder,decoder,cross", {"encoder", "decoder", "cross"}),
    ],
)
def test_places_are_read_in_any_order(text, places):
    assert parse_places(text) == places


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("text", ["", " ", "all", "encoder,self", "none,cross", "encoder;cross", "Encoder"])
def test_unknown_places_are_named(text):
    with pytest.raises(ValueError) as error:
        build(fast_weight_attention=text)
    assert str(error.value) == (
        f"fast_weight_attention is {text!r}; it must be none, or a comma-separated list of encoder, decoder, cross"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixers": "delta:1"}, "mixers is 'delta:1', which leaves layers without a mixer: 2"),
        (
            {"mixers": "delta,softmax:2", "decoder_layers_to_keep": "0"},
            "decoder_layers_to_keep is '0' and mixers is 'delta,softmax:2'",
        ),
        ({"update_rule": "hebb"}, "update_rule is 'hebb'; it must be one of sum, gated, decay, delta"),
        ({"normalization": "l2"}, "normalization is 'l2'; it must be auto, none"),
        ({"normalization": "removal"}, "the sum rule removes nothing"),
        ({"feature_map": "favor", "feature_dim": 7}, "feature_dim is 7; .* even"),
        ({"feature_map": "dpfp", "dpfp_nu": 16}, "dpfp_nu is 16; .* from 1 to 15"),
        ({"decoder_attention_heads": 3}, "num_heads is 3; it must be a divisor of embed_dim, 16"),
        ({"encoder_attention_heads": 5}, "num_heads is 5; it must be a divisor of embed_dim, 16"),
        ({"fast_weight_backend": "cuda"}, "backend is 'cuda'; it must be one of auto, reference, chunkwise, native"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_work_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("places", ["encoder,decoder,cross", "decoder"])
def test_a_decoders_memory_does_not_hold_the_source(places):
    with pytest.raises(ValueError, match=f"cross_self_attention is set and fast_weight_attention is '{places}'"):
        build(cross_self_attention=True, fast_weight_attention=places)


@pytest.mark.parametrize("learned", [False, True], ids=["sinusoidal", "learned"])
@pytest.mark.parametrize("places", [SUBSETS[0], "none"])
@torch.no_grad()
def test_sources_may_be_as_long_as_there_are_positions(places, learned):
    model = build(fast_weight_attention=places, max_source_positions=8, encoder_learned_pos=learned)
    target = torch.tensor([[EOS, 5]])
    assert model(**batch(sentences([8])), prev_output_tokens=target)[0].isfinite().all()
    with pytest.raises(ValueError) as error:
        model(**batch(sentences([4, 9])), prev_output_tokens=target.repeat(2, 1))
    assert str(error.value) == "a source has 9 tokens; the model takes at most 8 (--max-source-positions)"
    # Padding needs no position.
    inputs = batch(sentences([8, 3]))
    padded = {**inputs, "src_tokens": F.pad(inputs["src_tokens"], (5, 0), value=PAD)}
    out, expected = (model(**x, prev_output_tokens=target.repeat(2, 1))[0] for x in (padded, inputs))
    assert relative_error(out, expected) <= SCORES


def test_positions_are_counted_for_fairseqs_commands():
    model = build(max_source_positions=8, max_target_positions=9)
    assert model.max_positions() == (8, 9)


def test_a_memory_cannot_be_read_with_what_follows():
    for places in SUBSETS:
        model, inputs = build(fast_weight_attention=places), example()
        encoder_out = model.encoder(inputs["src_tokens"])
        if "decoder" in places:
            with pytest.raises(ValueError, match="full_context_alignment must be False"):
                model.decoder(inputs["prev_output_tokens"], encoder_out=encoder_out, full_context_alignment=True)
        else:
            model.decoder(inputs["prev_output_tokens"], encoder_out=encoder_out, full_context_alignment=True)


def generation(**settings: Any) -> Any:
    return SimpleNamespace(generation=SimpleNamespace(beam=4, **settings))


@pytest.mark.parametrize(
    ("option", "value"), [("print_alignment", "hard"), ("print_alignment", "soft"), ("replace_unk", "")]
)
def test_alignments_are_refused_where_there_are_none(option, value):
    for places in SUBSETS:
        model = build(fast_weight_attention=places)
        if "cross" in places:
            with pytest.raises(ValueError, match=f"^{option} is '{value}'; it must be left out"):
                model.prepare_for_inference_(generation(**{option: value}))
        else:
            model.prepare_for_inference_(generation(**{option: value}))


def test_without_alignments_every_model_can_generate():
    for settings in ({}, {"print_alignment": None, "replace_unk": None}):
        model = build()
        model.prepare_for_inference_(generation(**settings))
        assert not model.decoder.layers[0].need_attn


@pytest.mark.slow
def test_torch_compile_computes_the_same():
    model, inputs = build(encoder_layers=1, decoder_layers=1), example()
    expected = model(**inputs)[0]
    compiled = torch.compile(model, backend="aot_eager")  # what is left out is the compiler, a quarter of a minute
    assert relative_error(compiled(**inputs)[0], expected) <= SCORES
