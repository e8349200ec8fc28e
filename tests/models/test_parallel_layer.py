"""A parallel layer is x + attention(norm(x)) + feed_forward(norm(x)), with softmax attention and with fast weights."""

from __future__ import annotations

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq_fastweights.models.parallel_layer import ParallelDecoderLayer

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.softmax_attention import RotaryAttention

BUILDERS = {
    "fairseq's": None,
    "rotary": lambda width: RotaryAttention(width, 2, rotary_dim=4),
    "delta": lambda width: FastWeightAttention(width, 2),
}


def configuration(**options) -> TransformerConfig:
    cfg = TransformerConfig()
    cfg.decoder.embed_dim, cfg.decoder.ffn_embed_dim, cfg.decoder.attention_heads = 16, 24, 2
    cfg.decoder.normalize_before = True
    cfg.dropout = 0.0
    for name, value in options.items():
        setattr(cfg, name, value)
    return cfg


def build(build_attention=None, **options) -> ParallelDecoderLayer:
    torch.manual_seed(0)
    layer = ParallelDecoderLayer(configuration(**options), build_attention).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


X = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(1))
FUTURE = torch.full((7, 7), float("-inf")).triu(1)


@pytest.mark.parametrize("name", BUILDERS)
def test_it_is_its_definition(name):
    layer = build(BUILDERS[name])
    normed = layer.self_attn_layer_norm(X)
    attended, _ = layer.self_attn(normed, normed, normed, attn_mask=FUTURE)
    fed = layer.fc2(torch.relu(layer.fc1(layer.final_layer_norm(X))))
    out, weights, _ = layer(X, self_attn_mask=FUTURE)
    assert weights is None
    assert torch.allclose(out, X + attended + fed, atol=1e-6)  # another order of two sums
    # And not one after the other.
    after = X + attended
    after = after + layer.fc2(torch.relu(layer.fc1(layer.final_layer_norm(after))))
    assert (out - after).norm() > 0.1 * out.norm()


@pytest.mark.parametrize("name", BUILDERS)
def test_step_by_step_it_is_the_same(name):
    layer = build(BUILDERS[name])
    with torch.no_grad():
        full = layer(X, self_attn_mask=FUTURE)[0]
        state: dict = {}
        steps = [layer(X[t : t + 1], incremental_state=state)[0] for t in range(len(X))]
    assert torch.allclose(torch.cat(steps), full, atol=1e-5)


def test_parameters_are_fairseqs():
    theirs = TransformerDecoderLayerBase(configuration(), no_encoder_attn=True)
    build().load_state_dict(theirs.state_dict(), strict=True)


def test_dropout_falls_on_both_branches():
    layer = build(dropout=1.0 - 1e-9).train()
    assert torch.equal(layer(X, self_attn_mask=FUTURE)[0], X)


@pytest.mark.parametrize("name", ["scale_attn", "scale_heads", "scale_fc", "scale_resids"])
def test_scales_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is set; with parallel_residual"):
        build(**{name: True})


def test_norms_after_the_branches_are_refused():
    cfg = configuration()
    cfg.decoder.normalize_before = False
    with pytest.raises(ValueError, match="parallel_residual is set; it needs decoder_normalize_before"):
        ParallelDecoderLayer(cfg)
