"""What the attention module is made of: names, sizes and first values of its parameters, what it
warns of and what it refuses."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.mixers import memory_attention
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention, uniform_gate_bias_
from fairseq_fastweights.mixers.memory_attention import MemoryAttention
from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES, known_to_diverge


def build(embed_dim: int = 64, num_heads: int = 4, update_rule: str = "delta", **options) -> MemoryAttention:
    torch.manual_seed(0)
    if update_rule == "retention":
        return Retention(embed_dim, num_heads, **options)
    return FastWeightAttention(embed_dim, num_heads, update_rule=update_rule, **options)


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in module.state_dict().items()}


# ---------------------------------------------------------------------------- names and sizes

# Beside q, k, v and out, for 64 wide and 4 heads of 16.
GATES = {
    "sum": {},
    "gated": {"gate_proj": 4},
    "decay": {"key_decay_proj": 64, "value_decay_proj": 64},
    "delta": {"beta_proj": 4},
    "retention": {"g_proj": 64},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", GATES)
def test_parameters_are_fairseqs_and_the_gates(rule, bias):
    expected = shapes(MultiheadAttention(64, 4, bias=bias, self_attention=True))
    for name, width in GATES[rule].items():
        expected[f"{name}.weight"] = (width, 64)
        # A gate that decays the memory has a bias in any case: its spread is where decays start.
        if bias or rule not in ("delta", "retention"):
            expected[f"{name}.bias"] = (width,)
    assert shapes(build(update_rule=rule, bias=bias)) == expected


SIZES = [
    # map, options, width of q and k, size after the map, other parameters and buffers
    ("identity", {"feature_dim": 4}, 16, 4, {}),
    ("identity", {"feature_dim": 48}, 192, 48, {}),
    ("elu", {"feature_dim": 4}, 16, 4, {}),
    ("elu", {"feature_dim": 48}, 192, 48, {}),
    ("tanh", {"feature_dim": 48}, 192, 48, {}),
    ("relu", {"feature_dim": 4}, 64, 4, {"weight": (4, 4, 16), "bias": (4, 4)}),
    ("relu", {"feature_dim": 48}, 64, 48, {"weight": (4, 48, 16), "bias": (4, 48)}),
    ("favor", {"feature_dim": 4}, 64, 4, {"features": (2, 16)}),
    ("favor", {"feature_dim": 48}, 64, 48, {"features": (24, 16)}),
    ("favor", {"favor_features": 5}, 64, 10, {"features": (5, 16)}),
    ("dpfp", {}, 64, 32, {}),
    ("dpfp", {"dpfp_nu": 3}, 64, 96, {}),
]


@pytest.mark.parametrize("rule", GATES)
@pytest.mark.parametrize(("feature_map", "options", "width", "size", "others"), SIZES)
def test_state_size_is_independent_of_the_head_dim(rule, feature_map, options, width, size, others):
    module = build(update_rule=rule, feature_map=feature_map, normalization=frozenset(), **options)
    expected = {"q_proj": width, "k_proj": width, "v_proj": 64, "out_proj": 64, **GATES[rule]}
    if rule == "decay":
        expected["key_decay_proj"] = 4 * size
    assert shapes(module) == {
        **{f"{name}.weight": (n, 64) for name, n in expected.items()},
        **{f"{name}.bias": (n,) for name, n in expected.items()},
        **{f"feature_map.{name}": shape for name, shape in others.items()},
    }
    out, state = module(0.1 * torch.randn(3, 2, 64))
    assert out.shape == (3, 2, 64)
    assert state["state"].shape == (2, 4, size, 16) and state["state"].dtype == torch.float32


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_what_is_left_out_is_what_the_paper_of_the_rule_uses(rule):
    default, explicit = (
        build(update_rule=rule, **options)
        for options in (
            {},
            {
                "feature_map": UPDATE_RULES[rule].feature_map,
                "normalization": UPDATE_RULES[rule].normalization,
                "feature_dim": 16,
                "bias": True,
                "scale_read_out": False,
                "dropout": 0.0,
            },
        )
    )
    x = torch.randn(5, 2, 64)
    assert torch.equal(default(x)[0], explicit(x)[0])


# ------------------------------------------------------------------------------- first values


@pytest.mark.parametrize("rule", GATES)
def test_projections_start_as_fairseqs(rule):
    module, theirs = build(update_rule=rule), MultiheadAttention(64, 4, self_attention=True)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        ours, other = (getattr(m, name).weight.detach() for m in (module, theirs))
        # Uniform on both sides: 4096 draws come within 1 % of either bound (the chance that they
        # do not is 0.995^4096 = 1e-9), and their variance is known to sqrt(0.8 / 4096) = 1.4 %.
        for x in (ours, -ours):
            assert x.max().item() == pytest.approx(other.abs().max().item(), rel=0.01), name
        assert ours.var().item() == pytest.approx(ours.max().item() ** 2 / 3, rel=0.07), name
    for name in ("q_proj", "k_proj", "v_proj"):
        ours, other = (getattr(m, name).bias.detach().abs().max() for m in (module, theirs))
        # 64 draws come within 10 % of the bound, but for a chance of 0.9^64 = 1e-3.
        assert ours.item() == pytest.approx(other.item(), rel=0.1), name
    assert not module.out_proj.bias.any() and not theirs.out_proj.bias.any()


@pytest.mark.parametrize("units", [3, 16, 1000])
def test_gates_start_uniformly_spread(units):
    """sigmoid(bias) ~ U(1/n, 1 - 1/n), Gu et al. 2020; Mao 2022, Sec. 3."""
    torch.manual_seed(1)
    bias = torch.nn.Parameter(torch.zeros(10_000))
    uniform_gate_bias_(bias, units)
    margin = 1 / units
    gates = bias.detach().double().sigmoid().sort().values
    # Rounding of the logarithm's result in float32.
    assert margin - 1e-6 <= gates[0] and gates[-1] <= 1 - margin + 1e-6
    steps = torch.arange(1, 10_001) / 10_000
    distance = ((gates - margin) / (1 - 2 * margin) - steps).abs().max().item()
    # Kolmogorov and Smirnov: beyond 0.02 with probability 2 exp(-2 * 10,000 * 0.02^2) = 7e-4, on a
    # fixed seed. A normal bias of any width is beyond 0.05.
    assert distance <= 0.02


@pytest.mark.parametrize(
    ("rule", "gate", "units"),
    [("gated", "gate_proj", 8), ("decay", "key_decay_proj", 6), ("decay", "value_decay_proj", 16)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_decays_start_within_the_bounds_for_their_units(rule, gate, units, bias):
    """Units: the heads for one gate a head, the dimensions for one gate a dimension."""
    module = build(128, 8, update_rule=rule, bias=bias, feature_dim=6)
    for _ in range(100):
        gates = getattr(module, gate).bias.detach().sigmoid()
        assert gates.min() >= 1 / units - 1e-6 and gates.max() <= 1 - 1 / units + 1e-6
        assert gates.unique().numel() > 1
        module.reset_special_parameters()


@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_gate_of_one_or_two_units_starts_half_open(num_heads):
    # U(1/n, 1 - 1/n) is empty for n = 1, and a point for n = 2.
    module = build(update_rule="gated", num_heads=num_heads)
    assert torch.equal(module.gate_proj.bias.sigmoid(), torch.full((num_heads,), 0.5))


# ----------------------------------------------------------------------------------- warnings

WARNED = [
    ("delta", "elu", (), "Table 3"),
    ("delta", "elu", ("attention", "removal"), "Table 3"),
    ("delta", "identity", ("sum",), "Table 1"),
    ("delta", "favor", ("sum",), "Tables 2 and 5"),
    ("sum", "relu", (), "Table 1"),
    ("gated", "relu", ("attention",), "Table 1"),
    ("sum", "identity", ("attention",), "Mao 2022, Sec. 4.1.2"),
]


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(memory_attention, "_warned_of", set())
    caplog.set_level(logging.WARNING, memory_attention.logger.name)
    return caplog


@pytest.mark.parametrize(("rule", "feature_map", "normalization", "source"), WARNED)
def test_what_a_paper_saw_diverge_is_allowed_with_one_warning(warnings, rule, feature_map, normalization, source):
    for _ in range(3):  # a model has many layers
        build(update_rule=rule, feature_map=feature_map, normalization=frozenset(normalization))
    (record,) = warnings.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert f"update rule {rule} with {feature_map}" in message
    assert known_to_diverge(rule, feature_map, frozenset(normalization)) in message
    assert source in message


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, r"num_heads is 0; it must be a divisor of embed_dim, 64"),
        ({"num_heads": -4}, r"num_heads is -4; it must be a divisor of embed_dim, 64"),
        ({"num_heads": 5}, r"num_heads is 5; it must be a divisor of embed_dim, 64"),
        (
            {"backend": "cuda"},
            r"backend is 'cuda'; it must be one of auto, reference, chunkwise, native",
        ),
        (
            {"update_rule": "hebb"},
            r"update_rule is 'hebb'; it must be one of sum, gated, decay, delta",
        ),
        (
            {"normalization": frozenset({"sum", "softmax"})},
            r"normalization is 'softmax,sum'; it may hold sum, attention, removal",
        ),
        *(
            (
                {"update_rule": rule, "normalization": frozenset({"sum", "removal"})},
                rf"normalization is 'removal,sum', but the {rule} rule removes nothing .* with delta$",
            )
            for rule in ("sum", "gated", "decay")
        ),
        (
            {"update_rule": "retention", "normalization": frozenset({"sum"})},
            r"normalization is 'sum'; with retention it must be none: what is read",
        ),
        (
            {"feature_map": "softmax"},
            r"feature map 'softmax'; .* identity, elu, relu, favor, dpfp, tanh",
        ),
        ({"feature_map": "elu", "feature_dim": 0}, r"feature_dim is 0; .*positive integer"),
        ({"feature_map": "favor", "feature_dim": 7}, r"feature_dim is 7; .*favor .*even"),
        (
            {"feature_map": "favor", "feature_dim": 8, "favor_features": 3},
            r"feature_dim is 8; with favor_features 3 it must be 6",
        ),
        ({"feature_map": "favor", "favor_features": 0}, r"favor_features is 0; .*positive"),
        ({"feature_map": "dpfp", "feature_dim": 48}, r"feature_dim is 48; .*dpfp_nu = 32"),
        ({"feature_map": "dpfp", "dpfp_nu": 32}, r"dpfp_nu is 32; .*head_dim 16 .*from 1 to 31"),
    ],
    # Sets in order: parallel workers must agree on the names of tests.
    ids=lambda value: (
        ",".join(f"{k}={sorted(v) if isinstance(v, frozenset) else v}" for k, v in value.items())
        if isinstance(value, dict)
        else ""
    ),
)
def test_impossible_modules_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_the_scale_is_that_of_the_head_dim():
    assert build(scale_read_out=True, feature_dim=48).scale == 1 / math.sqrt(16)
