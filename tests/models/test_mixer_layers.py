"""Layers with mixers are fairseq's layers: one after the other, or in parallel, step by step, with fairseq's noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.fast_weight_source_attention import FastWeightSourceAttention
from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.models.mixer_layers import MixerDecoderLayer, MixerEncoderLayer, ParallelDecoderLayer

BUILDERS = {
    "softmax": lambda width: SoftmaxAttention(width, 2),
    "rotary": lambda width: SoftmaxAttention(width, 2, rotary_dim=4),
    "delta": lambda width: FastWeightAttention(width, 2),
    "mamba": Mamba,
}


def configuration(pre_norm: bool = True, noise: float = 0.0, **options) -> TransformerConfig:
    cfg = TransformerConfig()
    for side in (cfg.encoder, cfg.decoder):
        side.embed_dim, side.ffn_embed_dim, side.attention_heads, side.normalize_before = 16, 24, 2, pre_norm
    cfg.dropout = 0.0
    cfg.quant_noise.pq = noise
    for name, value in options.items():
        setattr(cfg, name, value)
    return cfg


def shaken(layer: Any) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer.eval()


def build(kind: type = ParallelDecoderLayer, name: str = "delta", **options) -> Any:
    torch.manual_seed(0)
    others = {} if kind is ParallelDecoderLayer else {"no_encoder_attn": True}
    return shaken(kind(configuration(**options), BUILDERS[name], **others))


X = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(1))


def fed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.fc2(torch.relu(layer.fc1(x)))


@pytest.mark.parametrize("name", BUILDERS)
def test_layers_are_their_definitions(name):
    layer = build(name=name)
    mixed = X + layer.self_attn(layer.self_attn_layer_norm(X))[0]
    out, weights, _ = layer(X)
    assert weights is None
    assert torch.allclose(out, mixed + fed(layer, layer.final_layer_norm(X)), atol=1e-5)  # another order of two sums
    after = build(MixerDecoderLayer, name)
    one_after_the_other = mixed + fed(layer, layer.final_layer_norm(mixed))
    assert torch.allclose(after(X)[0], one_after_the_other, atol=1e-5)
    assert (out - one_after_the_other).norm() > 0.1 * out.norm()
    norm_behind = build(MixerDecoderLayer, name, pre_norm=False)
    mixed = layer.self_attn_layer_norm(X + layer.self_attn(X)[0])
    assert torch.allclose(norm_behind(X)[0], layer.final_layer_norm(mixed + fed(layer, mixed)), atol=1e-5)


@pytest.mark.parametrize("kind", [MixerDecoderLayer, ParallelDecoderLayer])
@pytest.mark.parametrize("name", BUILDERS)
@torch.no_grad()
def test_step_by_step_they_are_the_same_and_two_share_one_state(kind, name):
    layers = [build(kind, name), build(kind, "delta")]
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, :2] = True
    full = layers[1](layers[0](X, self_attn_padding_mask=padding)[0], self_attn_padding_mask=padding)[0]
    state: dict = {}
    for t, out in enumerate(X.split(1)):
        for layer in layers:
            out = layer(out, incremental_state=state, self_attn_padding_mask=padding[:, t : t + 1])[0]
        assert torch.allclose(out[0, ~padding[:, t]], full[t, ~padding[:, t]], atol=1e-5)
    before = {mixer: {n: x[[2, 2]] for n, x in kept.items()} for mixer, kept in state.items()}
    for layer in layers:
        layer.reorder_incremental_state(state, torch.tensor([2, 2]))
    for mixer, kept in before.items():
        assert all(torch.equal(state[mixer][n], x) for n, x in kept.items())


def test_parameters_are_fairseqs_with_those_of_old_too():
    theirs = TransformerDecoderLayerBase(configuration(), no_encoder_attn=True).state_dict()
    layer = build(name="softmax")
    layer.load_state_dict(theirs, strict=True)
    old = {f"layer.{name}": x for name, x in theirs.items()}
    for kind in ("weight", "bias"):
        parts = [old.pop(f"layer.self_attn.{name}_proj.{kind}") for name in "qkv"]
        old[f"layer.self_attn.in_proj_{kind}"] = torch.cat(parts)
    layer.upgrade_state_dict_named(old, "layer")
    assert old.keys() == {f"layer.{name}" for name in theirs}
    assert all(torch.equal(old[f"layer.{name}"], x) for name, x in theirs.items())


def test_an_encoder_reads_all_of_its_source_and_a_decoder_what_that_made():
    torch.manual_seed(0)
    cfg = configuration()
    cross = {"build_cross_mixer": lambda width: FastWeightSourceAttention(width, 2)}
    encoder = shaken(MixerEncoderLayer(cfg, lambda width: FastWeightSourceAttention(width, 2)))
    decoder = shaken(MixerDecoderLayer(cfg, BUILDERS["delta"], **cross))
    own = shaken(MixerDecoderLayer(cfg, None, **cross))  # fairseq's attention to the target
    assert isinstance(own.self_attn, MultiheadAttention)
    source, padding = X.flip(0), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    made = encoder(source, encoder_padding_mask=padding)
    short = encoder(source[:5, 1:2], encoder_padding_mask=None)
    assert torch.allclose(made[:5, 1:2], short, atol=1e-5)
    future = torch.full((7, 7), -torch.inf).triu(1)
    for layer in (decoder, own):
        out = layer(X, made, padding, self_attn_mask=future)[0]
        assert torch.allclose(out[:, 1:2], layer(X[:, 1:2], short, self_attn_mask=future)[0], atol=1e-5)
        state: dict = {}
        steps = [layer(x, made, padding, incremental_state=state)[0] for x in X.split(1)]
        assert torch.allclose(torch.cat(steps), out, atol=1e-5)


def test_dropout_falls_on_both_branches_and_stays_where_it_is_retained():
    layer = build(dropout=1.0 - 1e-9).train()
    assert torch.equal(layer(X)[0], X)
    layer = build(name="softmax", attention_dropout=0.0)
    layer.self_attn.dropout_module.p = 0.5
    assert torch.equal(layer(X)[0], layer(X)[0])
    layer.self_attn.dropout_module.make_generation_fast_("", retain_dropout=True)
    assert not torch.equal(layer(X)[0], layer(X)[0])


def test_quantisation_noise_reaches_every_projection():
    layer = build(noise=0.5).train()
    before = {name: x.weight.clone() for name, x in layer.self_attn.named_children() if "proj" in name}
    assert len(before) == 5
    layer(X)
    for name in before.keys() - {"beta_proj"}:  # two rows, of which noise may take none
        assert not torch.equal(getattr(layer.self_attn, name).weight, before[name]), name


@pytest.mark.parametrize("name", ["scale_attn", "scale_heads", "scale_fc", "scale_resids"])
def test_scales_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is set; with parallel_residual"):
        build(**{name: True})
