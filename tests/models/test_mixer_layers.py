"""A layer whose two branches lie side by side, and fairseq's dropout in layers with mixers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairseq.models.transformer import TransformerConfig

from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.models.layer_forms import ParallelDecoderLayer

BUILDERS = {"softmax": lambda width: SoftmaxAttention(width, 2, rotary_dim=4), "mamba": Mamba}
X = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(1))


def build(name: str = "mamba", **options: Any) -> ParallelDecoderLayer:
    torch.manual_seed(0)
    cfg = TransformerConfig()
    side = cfg.decoder
    side.embed_dim, side.ffn_embed_dim, side.attention_heads, side.normalize_before = 16, 24, 2, True
    for option, value in {"dropout": 0.0, **options}.items():
        setattr(cfg, option, value)
    layer = ParallelDecoderLayer(cfg, BUILDERS[name])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer.eval()


@pytest.mark.parametrize("name", BUILDERS)
def test_a_parallel_layer_is_its_definition(name):
    layer = build(name)
    mixed = X + layer.self_attn(layer.self_attn_layer_norm(X))[0]
    out, weights, _ = layer(X)
    expected = mixed + layer.fc2(torch.relu(layer.fc1(layer.final_layer_norm(X))))
    assert weights is None and torch.allclose(out, expected, atol=1e-5)  # another order of two sums
    one_after_the_other = mixed + layer.fc2(torch.relu(layer.fc1(layer.final_layer_norm(mixed))))
    assert (out - one_after_the_other).norm() > 0.1 * out.norm()


def test_dropout_falls_on_both_branches_and_stays_where_it_is_retained():
    layer = build(dropout=1.0 - 1e-9).train()
    assert torch.equal(layer(X)[0], X)
    layer = build(name="softmax", attention_dropout=0.0)
    layer.self_attn.dropout_module.p = 0.5
    assert torch.equal(layer(X)[0], layer(X)[0])
    layer.self_attn.dropout_module.make_generation_fast_("", retain_dropout=True)
    assert not torch.equal(layer(X)[0], layer(X)[0])


def test_scales_are_refused_by_name():
    for name in ("scale_attn", "scale_heads", "scale_fc", "scale_resids"):
        with pytest.raises(ValueError, match=f"{name} is set; with parallel_residual"):
            build(**{name: True})
