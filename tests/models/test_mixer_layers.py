"""Layers with mixers are fairseq's layers: one after the other, or in parallel, step by step, with fairseq's noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq.models.transformer import TransformerConfig

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.models.mixer_layers import MixerDecoderLayer, ParallelDecoderLayer

BUILDERS = {
    "softmax": lambda width: SoftmaxAttention(width, 2),
    "rotary": lambda width: SoftmaxAttention(width, 2, rotary_dim=4),
    "delta": lambda width: FastWeightAttention(width, 2),
    "mamba": Mamba,
}


def build(kind: type = ParallelDecoderLayer, name: str = "delta", pre_norm: bool = True, **options) -> Any:
    torch.manual_seed(0)
    cfg = TransformerConfig()
    side = cfg.decoder
    side.embed_dim, side.ffn_embed_dim, side.attention_heads, side.normalize_before = 16, 24, 2, pre_norm
    for option, value in {"dropout": 0.0, **options}.items():
        setattr(cfg, option, value)
    layer = kind(cfg, BUILDERS[name], **({} if kind is ParallelDecoderLayer else {"no_encoder_attn": True}))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer.eval()


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


def test_dropout_falls_on_both_branches_and_stays_where_it_is_retained():
    layer = build(dropout=1.0 - 1e-9).train()
    assert torch.equal(layer(X)[0], X)
    layer = build(name="softmax", attention_dropout=0.0)
    layer.self_attn.dropout_module.p = 0.5
    assert torch.equal(layer(X)[0], layer(X)[0])
    layer.self_attn.dropout_module.make_generation_fast_("", retain_dropout=True)
    assert not torch.equal(layer(X)[0], layer(X)[0])


@pytest.mark.parametrize("name", ["scale_attn", "scale_heads", "scale_fc", "scale_resids"])
def test_scales_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is set; with parallel_residual"):
        build(**{name: True})
