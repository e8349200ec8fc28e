"""Layers with mixers: they are fairseq's but for attention, with its dropout; two branches may lie side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase

from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.models.mixer_layers import MixerDecoderLayer, MixerEncoderLayer

BUILDERS = {"softmax": lambda width: SoftmaxAttention(width, 2, rotary_dim=4), "mamba": Mamba}
X = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(1))


def config(normalize_before: bool = True, **options: Any) -> TransformerConfig:
    cfg = TransformerConfig()
    for side in (cfg.encoder, cfg.decoder):
        side.embed_dim, side.ffn_embed_dim, side.attention_heads = 16, 24, 2
        side.normalize_before = normalize_before
    for option, value in {"dropout": 0.0, **options}.items():
        setattr(cfg, option, value)
    return cfg


def redrawn(layer: Any) -> Any:
    """The layer with other weights, in evaluation."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer.eval()


def build(name: str = "mamba", **options: Any) -> MixerDecoderLayer:
    torch.manual_seed(0)
    return redrawn(MixerDecoderLayer(config(**options), BUILDERS[name], no_encoder_attn=True, form="parallel"))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_parallel_layer_is_its_definition(name):
    layer = build(name)
    mixed = X + layer.self_attn(layer.self_attn_layer_norm(X))[0]
    out, weights, _ = layer(X)
    expected = mixed + layer.fc2(torch.relu(layer.fc1(layer.final_layer_norm(X))))
    assert weights is None and torch.allclose(out, expected, atol=1e-5)  # another order of two sums
    one_after_the_other = mixed + layer.fc2(torch.relu(layer.fc1(layer.final_layer_norm(mixed))))
    assert (out - one_after_the_other).norm() > 0.1 * out.norm()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_decoder_layer_with_fairseqs_attention_is_fairseqs(before, scaled):
    cfg = config(before, **dict.fromkeys(("scale_attn", "scale_heads", "scale_fc", "scale_resids"), scaled))
    layer = redrawn(MixerDecoderLayer(cfg))
    padding = torch.zeros(3, 7, dtype=torch.bool).index_fill(1, torch.tensor([6]), True)
    given = {"self_attn_mask": torch.full((7, 7), -torch.inf).triu(1), "self_attn_padding_mask": padding}
    source = {"encoder_out": X[:4] * 2, "encoder_padding_mask": padding[:, 3:]}
    for options in ({}, given | source, source | {"need_head_weights": True}, source | {"incremental_state": {}}):
        again = {name: {} if name == "incremental_state" else x for name, x in options.items()}
        found, wanted = layer(X, **options), TransformerDecoderLayerBase.forward(layer, X, **again)
        for x, y in zip(found, wanted, strict=True):
            assert (x is y is None) or torch.allclose(x, y, atol=1e-6)
        assert len(options.get("incremental_state", {})) == len(again.get("incremental_state", {}))


@pytest.mark.parametrize("before", [True, False])
def test_an_encoder_layer_is_fairseqs_but_for_attention(before):
    class Doubles(Mixer):
        def forward(self, x, state=None, padding=None, *, overwrite=False):
            return 2 * x.masked_fill(padding.t()[..., None], 0), {}

    class Attention(torch.nn.Module):
        def forward(self, query, key_padding_mask, **others):
            return 2 * query.masked_fill(key_padding_mask.t()[..., None], 0), None

    ours = redrawn(MixerEncoderLayer(config(before), BUILDERS["softmax"]))
    theirs = TransformerEncoderLayerBase(config(before))
    ours.self_attn, theirs.self_attn, theirs.can_use_fastpath = Doubles(16), Attention(), False
    for name, parameter in ours.named_parameters():
        theirs.get_parameter(name).data = parameter.data
    padding = torch.zeros(3, 7, dtype=torch.bool).index_fill(1, torch.tensor([6]), True)
    assert torch.allclose(ours(X, padding), theirs.eval()(X, padding), atol=1e-6)


def test_dropout_falls_on_both_branches_and_stays_where_it_is_retained():
    layer = build(dropout=1.0 - 1e-9).train()
    assert torch.equal(layer(X)[0], X)
    layer = build(name="softmax", attention_dropout=0.0)
    layer.self_attn.dropout_module.p = 0.5
    assert torch.equal(layer(X)[0], layer(X)[0])
    layer.self_attn.dropout_module.make_generation_fast_("", retain_dropout=True)
    assert not torch.equal(layer(X)[0], layer(X)[0])


@pytest.mark.parametrize("name", ["scale-attn", "scale-heads", "scale-fc", "scale-resids"])
def test_scales_are_refused_by_name(fairseq, name):
    with pytest.raises(ValueError, match=f"{name.replace('-', '_')} is set; with parallel_residual"):
        fairseq.build(f"--parallel-residual --decoder-normalize-before --{name}")
