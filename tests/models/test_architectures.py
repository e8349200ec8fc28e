"""The named architectures are those of their papers; options that fit nothing are refused by name."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary
from fairseq.dataclass import initialize
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from omegaconf import OmegaConf
from torch import nn

from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.models import option_checks
from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel, FastWeightLanguageModelConfig
from fairseq_fastweights.models.option_checks import check_architecture

SMALL, MEDIUM = "fast_weight_lm_wiki103_small", "fast_weight_lm_wiki103_medium"
OURS = sorted(name for name, model in ARCH_MODEL_NAME_REGISTRY.items() if model == "fast_weight_lm" != name)
THEIRS = ["transformer_lm_gpt2_small", "transformer_lm_baevski_gbw", "transformer_ulm_tiny"]


@pytest.mark.parametrize(("arch", "width", "millions"), [(SMALL, 128, 44), (MEDIUM, 256, 90)])
def test_the_language_models_of_schlag_et_al(fairseq, arch, width, millions):
    """Sec. 6.3: 16 layers, 8 heads, 2048 between; Table 2 rounds to 40 and 90 million."""
    words = Dictionary()  # WikiText-103's 267,735 types, <unk> and the end of line among them, as fairseq pads them
    words.indices |= {f"w{i}": len(words) + i for i in range(267_744 - len(words))}
    words.symbols = list(words.indices)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    cfg = fairseq.parse(arch, "--tokens-per-sample 256")
    assert (cfg.decoder_embed_dim, cfg.decoder_input_dim, cfg.decoder_output_dim) == (width,) * 3
    assert (cfg.dropout, cfg.attention_dropout) == (0.1, 0.0)
    assert cfg.adaptive_input_cutoff == cfg.adaptive_softmax_cutoff == "20000,40000,200000"
    assert not cfg.no_token_positional_embeddings
    with torch.device("meta"):
        model = FastWeightLanguageModel.build_model(cfg, task)
    types, between, layers, heads, bands = 267_744, 2048, 16, 8, 4
    attention = 4 * width * width + width * heads  # q, k, v, out; the write strengths; no biases
    feed_forward_and_norms = 2 * width * between + between + width + 2 * 2 * width
    # One projection for each of 4 bands, shared by input and output; three classes of rare words.
    embeddings = types * width + bands * width * width + width * (bands - 1)
    expected = layers * (attention + feed_forward_and_norms) + embeddings
    assert sum(p.numel() for p in model.parameters()) == expected
    assert round(expected / 1e6) == millions
    decoder = model.decoder
    assert decoder.layer_norm is None and not any(x.normalize_before for x in decoder.layers)
    for layer in decoder.layers:
        attention = layer.self_attn
        assert all(module.bias is None for module in attention.children() if isinstance(module, nn.Linear))
        assert attention.beta_proj.weight.shape == (heads, width) and attention.scale == (width / heads) ** -0.5
        assert (attention.update_rule, attention.normalization) == ("delta", {"sum"})
        assert attention.feature_map_name == "elu"
    for band, own in enumerate([None, *decoder.adaptive_softmax.tail]):
        embedding, projection = shared = decoder.embed_tokens.weights_for_band(band)
        assert embedding.shape[1] == width and projection.shape == (width, width)
        tied = {id(module.weight) for module in own.modules() if hasattr(module, "weight")} if own else set()
        assert own is None or {id(weight) for weight in shared} <= tied


def test_weights_start_from_a_normal_distribution(fairseq):
    flags = "--decoder-layers 2 --adaptive-input-cutoff 10,20,30 --adaptive-softmax-cutoff 10,20,30"
    sizes = " ".join(f"--decoder-{name}-dim 128" for name in ("embed", "input", "output"))
    model = fairseq.build(f"{flags} {sizes} --decoder-attention-heads 8 --update-rule decay", arch=SMALL)
    modules = {name: x for name, x in model.named_modules() if isinstance(x, nn.Linear | nn.Embedding)}
    assert len(modules) >= 2 * 6 + 4
    for name, module in modules.items():
        weight, padding = module.weight.detach(), getattr(module, "padding_idx", None)
        if padding is not None:
            assert not weight[padding].any(), f"{name} of padding"
            weight = weight[torch.arange(len(weight)) != padding]
        # Five standard errors of a standard deviation and of a mean, over some forty weights.
        n = weight.numel()
        assert abs(weight.std().item() / 0.02 - 1) <= 5 / (2 * n) ** 0.5, name
        assert abs(weight.mean().item()) <= 5 * 0.02 / n**0.5, name
        if n > 1000:  # enough to tell that it is normal: a uniform one ends at 1.7
            assert 2.7 <= weight.abs().max().item() / 0.02 <= 6, name
        if "decay_proj" in name:  # decays start uniformly spread all the same
            gates = module.bias.sigmoid()
            assert (gates - 0.5).abs().max() <= 0.5 - 1 / 16 + 1e-6 and gates.std() > 0.1
        elif isinstance(module, nn.Linear) and module.bias is not None:
            assert not module.bias.any()


def in_hydra(arch: str, given: dict) -> dict:
    """The model's settings in a run of fairseq-hydra-train."""
    cfg = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(FairseqConfig)))
    cfg.task = {"_name": "fast_weight_language_modeling", "data": "", "tokens_per_sample": 16}
    cfg.model = {"_name": arch, **given}
    for _ in range(2):  # fairseq does it once before it imports the plugin, and once after
        initialize.add_defaults(cfg)
    return OmegaConf.to_container(cfg.model, resolve=True, enum_to_str=True)


@pytest.mark.parametrize("arch", [*OURS, *THEIRS])
def test_flags_overrule_an_architecture_and_hydra_does_the_same(our_fairseq, fairseq, arch):
    """Also if settings are those of the architecture's model (six layers)."""
    changed = {"decoder_layers": 6, "decoder_embed_dim": 24, "decoder_attention_heads": 4, "dropout": 0.25}
    changed |= {"decoder_normalize_before": True, "layernorm_embedding": True, "max_target_positions": 77}
    if arch in OURS:
        changed |= {"fast_weight_backend": "reference", "init_std": 0.5}
    for given in ({}, changed):
        flags = "".join(f" --{k.replace('_', '-')} {'' if v is True else v}" for k, v in given.items())
        args, model = fairseq.parse(arch, f"--tokens-per-sample 16 {flags}"), in_hydra(arch, given)
        assert given.items() <= vars(args).items()
        said = {name: value for name, value in vars(args).items() if name in model}  # by either
        assert len(said) >= 40 and said.items() <= model.items()


@pytest.mark.parametrize("arch", [SMALL, "fast_weight_lm_retnet_1b"])
def test_the_command_line_makes_the_configuration_of_hydra(our_fairseq, fairseq, arch):
    args = fairseq.parse(arch, "--tokens-per-sample 16")
    config = convert_namespace_to_omegaconf(args)
    assert config.model == in_hydra(arch, {})
    assert config.task.max_target_positions == args.max_target_positions


def test_switches_that_fairseqs_own_hydra_lost_are_told(our_fairseq, monkeypatch):
    check_architecture(Namespace(_name="fast_weight_lm", adaptive_input=False))  # whose default it is
    lost = Namespace(_name=SMALL, adaptive_input=False)
    check_architecture(lost)  # turned off in a file: hydra knows architectures
    switches = ("adaptive_input", "tie_adaptive_weights", "tie_adaptive_proj", "no_attention_bias", "scale_read_out")
    off = dict.fromkeys(switches, False)
    monkeypatch.setattr(option_checks, "add_defaults", lambda made: made.model.update(off))
    with pytest.raises(ValueError, match=f"_name is '{SMALL}', whose settings .* leaves out .adaptive_input is False"):
        check_architecture(lost)
    check_architecture(Namespace(_name=SMALL))


SOFTMAX = {"softmax_attention_layers": "2"}
ADAPTIVE = {"adaptive_input": True, "adaptive_input_cutoff": "10,25", "adaptive_softmax_cutoff": "10,25"}
TIED = {**ADAPTIVE, "tie_adaptive_weights": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"softmax_attention_layers": x}, rf"softmax_attention_layers is {x!r}; .* 'all' or .* numbers from 1 to 2")
            for x in ("0", "3", "1-2", "1;2", "one", "all,1", "²")
        ),
        *(
            ({"decoder_layers_to_keep": text}, rf"decoder_layers_to_keep is {text!r}; .* from 0 to 1, each once")
            for text in ("2", "0,2", "0,0", "1,", "one")
        ),
        ({"update_rule": "hebb"}, r"update_rule is 'hebb'; .*sum, gated, "),
        ({"update_rule": "gated-delta"}, r"update_rule is 'gated-delta'; .*retention; did you mean \w+\?$"),
        ({"feature_map": "softmax"}, r"feature map 'softmax'.*identity, elu, relu, favor"),
        ({"normalization": "layer"}, r"normalization is 'layer'; it must be auto, none"),
        ({"normalization": "removal", "update_rule": "sum"}, r"'removal', but the sum rule removes nothing"),
        ({"fast_weight_backend": "cuda"}, r"^fast_weight_backend is 'cuda'; .*auto, reference, chunkwise"),
        ({"decoder_attention_heads": 3}, r"^decoder_attention_heads is 3; .*divisor of decoder_embed_dim, 16"),
        *(
            ({"fast_weight_heads": n}, f"fast_weight_heads is {n}; it must be a divisor of decoder_embed_dim, 16")
            for n in (0, -2, 3, 32)
        ),
        ({"mixers": "delta:1"}, r"mixers is 'delta:1', which leaves layers without a mixer: 2"),
        ({"mixers": "delta", "softmax_attention_layers": "2"}, r"mixers is 'delta', and softmax_attention_layers is"),
        ({"mixers": "delta", "update_rule": "gated"}, r"update_rule is 'gated', which mixers, 'delta', has in no"),
        ({**SOFTMAX, "decoder_xformers_att_config": "{}"}, r"decoder_xformers_att_config is '{}'"),
        ({"mixers": "local", "local_window": 0}, r"^local_window is 0; it must be at least 1"),
        ({"mixers": "delta,mamba:2", "mamba_dt_rank": -1}, r"^mamba_dt_rank is -1; it must be"),
        ({**SOFTMAX, "rotary_dim": 3}, r"rotary_dim is 3; it must be an even number from 2 to the head dim, 8"),
        ({**SOFTMAX, "parallel_residual": True}, r"parallel_residual is set; it needs decoder_normalize_before"),
        ({"output_norm_layers": "1"}, r"output_norm_layers is set; it needs decoder_normalize_before, which is not"),
        ({"output_norm_layers": "3"}, r"output_norm_layers is '3'; it must be 'all' or .* from 1 to 2"),
        (
            {"output_norm_layers": "1", "parallel_residual": True, "decoder_normalize_before": True},
            r"parallel_residual is set; with output_norm_layers it must not be",
        ),
        ({"zero_centered_norms": True}, r"zero_centered_norms is set; it needs rms_norm_eps or query_key_norm_eps"),
        ({**SOFTMAX, "softmax_joint_norm": True}, r"^softmax_joint_norm is set; it needs query_key_norm_eps"),
        ({"feature_dim": 0}, r"feature_dim is 0; it must be at least 1"),
        ({"feature_map": "favor", "feature_dim": 8, "favor_features": 3}, r"is 8; with favor_features 3 it must be 6"),
        *(
            ({**ADAPTIVE, name: text}, rf"{name} is {text!r}")
            for name in ("adaptive_input_cutoff", "adaptive_softmax_cutoff")
            for text in ("", "abc", "10;20", "10,x", "20,10", "10,10", "10,10,20", "0,10", "-5,10", "10,45")
        ),
        ({**ADAPTIVE, "adaptive_input_cutoff": None}, r"adaptive_input_cutoff is None"),
        ({**ADAPTIVE, "adaptive_input_factor": 16}, r"factor is 16: with decoder_input_dim 16 .* at most 4$"),
        ({"tie_adaptive_weights": True}, r"tie_adaptive_weights is set; it needs adaptive_input, which is not"),
        ({**TIED, "adaptive_softmax_cutoff": "10,20"}, r"softmax_cutoff is '10,20'; .*that of the input, '10,25'"),
        ({**TIED, "adaptive_softmax_cutoff": None}, r"adaptive_softmax_cutoff is None"),
        ({**TIED, "adaptive_input_factor": 2.0}, r"adaptive_softmax_factor is 4(\.0)?; .*that of the input, 2\.0"),
        ({"square_projections": "none"}, r"square_projections is none; it needs adaptive_input or"),
        ({**TIED, "square_projections": "all"}, r"square_projections is 'all'; it must be one of keep, identity, none"),
        ({"adaptive_softmax_bias": True}, r"adaptive_softmax_bias is set; it needs adaptive_softmax_cutoff, which is"),
        ({**TIED, "decoder_output_dim": 8}, r"decoder_output_dim is 8; .*that of the input, 16"),
        ({"mask_special_symbols": True, **ADAPTIVE}, r"mask_special_symbols is set and adaptive_softmax_cutoff is"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(fairseq, options, message):
    args = fairseq.tiny("fast_weight_lm")
    assert set(options) <= {f.name for f in dataclasses.fields(FastWeightLanguageModelConfig)}
    for name, value in options.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=message):
        fairseq.task().build_model(args)


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
