"""Grouped keys and values, heads of any size, fewer biases and norms of queries and keys, in attention and memories."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import build_mixer
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling, turns

WIDTH, HEADS, DIM = 24, 4, 6


def build(name: str, **settings: Any) -> Mixer:
    torch.manual_seed(0)
    common = {"num_heads": HEADS, "fast_weight_heads": HEADS, "rotary_dim": 4}
    return build_mixer(name, WIDTH, common | settings).double().eval()


def whole_and_in_parts(mixer: Mixer) -> tuple[Tensor, Tensor]:
    x = torch.randn(9, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first, state = mixer(x[:5])
    parts = [first]
    for step in x[5:].split(1):
        y, state = mixer(step, state, overwrite=True)
        parts.append(y)
    return mixer(x)[0], torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", ["softmax", "sum", "gated", "decay", "delta"])
@torch.no_grad()
def test_heads_that_share_keys_and_values_are_as_heads_that_have_the_same(name, kv_heads):
    grouped, full = build(name, kv_heads=kv_heads), build(name)
    for parameter, values in grouped.named_parameters():
        if parameter.startswith(("k_proj.", "v_proj.")):
            heads = values.unflatten(0, (kv_heads, DIM))
            assert values.shape[0] == kv_heads * DIM
            values = torch.cat([heads[h * kv_heads // HEADS] for h in range(HEADS)])
        full.get_parameter(parameter).copy_(values)
    expected, _ = whole_and_in_parts(full)
    for given in whole_and_in_parts(grouped):
        assert torch.allclose(given, expected, atol=1e-10)


@pytest.mark.parametrize("name", ["softmax", "gated", "delta"])
@torch.no_grad()
def test_heads_of_another_size_with_norms_and_fewer_biases(name):
    mixer = build(name, kv_heads=2, head_dim=10, projection_bias="qkv", query_key_norm_eps=0.1)
    biases = {parameter.split("_")[0] for parameter, _ in mixer.named_parameters() if parameter.endswith("proj.bias")}
    assert biases - {"gate", "beta"} == {"q", "k", "v"} and mixer.out_proj.weight.shape == (WIDTH, 40)
    whole, parts = whole_and_in_parts(mixer)
    assert torch.allclose(whole, parts, atol=1e-10)
    # Nothing but their directions is read of queries and keys, up to the epsilon; the gates read none of them.
    for projection in (mixer.q_proj, mixer.k_proj):
        projection.weight *= 1e4
        projection.bias *= 1e4
    large = mixer(torch.ones(3, 1, WIDTH, dtype=torch.float64))[0]
    for projection in (mixer.q_proj, mixer.k_proj):
        projection.weight *= 1e4
        projection.bias *= 1e4
    assert torch.allclose(mixer(torch.ones(3, 1, WIDTH, dtype=torch.float64))[0], large, rtol=1e-6)
    # Gates keep their biases where projections have none.
    bare = FastWeightAttention(WIDTH, HEADS, projection_bias="none")
    assert [parameter for parameter, _ in bare.named_parameters() if "bias" in parameter] == ["beta_proj.bias"]


def test_scaled_frequencies_are_those_of_the_papers():
    positions = torch.arange(5, dtype=torch.float64)
    plain, linear = (turns(positions, 8, 99.0, torch.float64, parse_scaling(text)) for text in ("", "linear:4"))
    quarter = turns(positions / 4, 8, 99.0, torch.float64)
    assert all(torch.allclose(a, b) for a, b in zip(linear, quarter, strict=True))
    # Of waves of 6.3 to 198 positions: the shortest stay, the longest grow by 8.
    scaled = turns(positions, 8, 99.0, torch.float64, parse_scaling("llama3:8,1,4,32"))
    eighth = turns(positions / 8, 8, 99.0, torch.float64)
    assert torch.allclose(scaled[1][:, 0], plain[1][:, 0]) and torch.allclose(scaled[1][:, -1], eighth[1][:, -1])
    assert not torch.allclose(scaled[1][:, 1], plain[1][:, 1]) and not torch.allclose(scaled[1][:, 1], eighth[1][:, 1])


@pytest.mark.parametrize(
    "text", ["yarn:4", "linear", "linear:0", "linear:-1", "llama3:8,4,4,32", "llama3:8,1,4", "linear:1e999"]
)
def test_other_scalings_are_refused(text):
    with pytest.raises(ValueError, match=f"rotary_scaling is '{text}'; it must be linear:FACTOR or llama3:"):
        parse_scaling(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection_bias": "some"}, "projection_bias is 'some'; it must be one of all, qkv, none"),
        ({"query_key_norm_eps": -1.0}, "query_key_norm_eps is -1.0; it must be at least 0"),
        ({"kv_heads": 3}, "kv_heads is 3; it must be a divisor of num_heads, 4, or 0 for all"),
        ({"kv_heads": -1}, "kv_heads is -1; it must be a divisor"),
        ({"head_dim": -1}, "head_dim is -1; it must be at least 0"),
    ],
)
def test_projections_that_there_are_not_are_refused(options, message):
    for name in ("softmax", "delta"):
        with pytest.raises(ValueError, match=message):
            build(name, **options)
