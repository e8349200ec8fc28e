"""Names, sizes and first values of the parameters of fast weight attention, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention, uniform_gate_bias_
from fairseq_fastweights.mixers.linear_attention import LinearAttention
from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES


def build(update_rule: str = "delta", embed_dim: int = 64, num_heads: int = 4, **options) -> LinearAttention:
    torch.manual_seed(0)
    if update_rule == "retention":
        return Retention(embed_dim, num_heads, **options)
    return FastWeightAttention(embed_dim, num_heads, update_rule=update_rule, **options)


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in module.state_dict().items()}


RULES = (*UPDATE_RULES, "retention")
UNITS = [("gated", "gate_proj", 8), ("decay", "key_decay_proj", 6), ("decay", "value_decay_proj", 16)]


def gates(rule: str, size: int = 16) -> dict[str, tuple[int, bool]]:
    """Their numbers, and whether they are decays, for 64 wide, 4 heads of 16 and keys of this size after the map."""
    if rule == "retention":
        return {"g_proj": (64, False)}
    numbers = {"head": 4, "key": 4 * size, "value": 64}
    return {f"{x.name.removeprefix('log_')}_proj": (numbers[x.per], x.log) for x in UPDATE_RULES[rule].gates}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("feature_map", "options", "width", "size", "others"),
    [
        # map, options, width of q and k, size after the map, other parameters and buffers
        ("identity", {"bias": False}, 64, 16, {}),
        ("elu", {"feature_dim": 48}, 192, 48, {}),
        ("tanh", {"feature_dim": 48}, 192, 48, {}),
        ("relu", {"feature_dim": 4}, 64, 4, {"weight": (4, 4, 16), "bias": (4, 4)}),
        ("favor", {"feature_dim": 48}, 64, 48, {"features": (24, 16)}),
        ("favor", {"favor_features": 5}, 64, 10, {"features": (5, 16)}),
        ("dpfp", {"dpfp_nu": 3}, 64, 96, {}),
    ],
)
def test_parameters_and_states_are_as_large_as_the_map(rule, feature_map, options, width, size, others):
    module = build(rule, feature_map=feature_map, normalization=frozenset(), **options)
    expected = {"q_proj": width, "k_proj": width, "v_proj": 64, "out_proj": 64}
    expected |= {name: numbers for name, (numbers, _) in gates(rule, size).items()}
    decays = {name for name, (_, decays) in gates(rule).items() if decays}
    assert shapes(module) == {
        **{f"{name}.weight": (n, 64) for name, n in expected.items()},
        # A gate that decays the memory has a bias in any case: its spread is where decays start.
        **{f"{name}.bias": (n,) for name, n in expected.items() if options.get("bias", True) or name in decays},
        **{f"feature_map.{name}": shape for name, shape in others.items()},
    }
    _, state = module(0.1 * torch.randn(3, 2, 64))
    assert state["state"].shape == (2, 4, size, 16) and state["state"].dtype == torch.float32


def test_what_is_left_out_is_what_the_paper_of_the_rule_uses():
    for rule, row in UPDATE_RULES.items():
        papers = {"feature_map": row.feature_map, "normalization": row.normalization, "feature_dim": 16}
        default = build(rule)
        explicit = build(rule, **papers, dropout=0.0, bias=True, scale_read_out=False, dpfp_nu=1)
        x = torch.randn(5, 2, 64)
        assert torch.equal(default(x)[0], explicit(x)[0])
        assert default.scale == 1 and build(rule, scale_read_out=True, feature_dim=48).scale == 16**-0.5
    with pytest.raises(ValueError, match="update_rule is 'hebb'; it must be one of sum, gated, "):
        build("hebb")


@pytest.mark.parametrize("rule", RULES)
def test_projections_start_as_fairseqs(rule):
    module, theirs = build(rule), MultiheadAttention(64, 4, self_attention=True)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        ours, other = (getattr(m, name).weight.detach() for m in (module, theirs))
        # Uniform: 4096 draws come within 1 % of the bound, but for a chance of 0.99^4096 = 1e-18.
        assert ours.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.01), name
        assert ours.std().item() == pytest.approx(other.std().item(), rel=0.05), name
    assert not module.out_proj.bias.any() and not theirs.out_proj.bias.any()
    for name, (_, decays) in gates(rule).items():
        gate = getattr(module, name)
        assert gate.weight.abs().max().item() == pytest.approx(math.sqrt(6 / sum(gate.weight.shape)), rel=0.05)
        assert gate.bias.any() == decays


@pytest.mark.parametrize("units", [3, 16, 1000])
def test_gates_start_uniformly_spread(units):
    """sigmoid(bias) ~ U(1/n, 1 - 1/n), Gu et al. 2020; Mao 2022, Sec. 3."""
    torch.manual_seed(1)
    bias = torch.nn.Parameter(torch.zeros(10_000))
    uniform_gate_bias_(bias, units)
    margin = 1 / units
    gates = bias.detach().double().sigmoid().sort().values
    assert margin - 1e-6 <= gates[0] and gates[-1] <= 1 - margin + 1e-6
    steps = torch.arange(1, 10_001) / 10_000
    # Kolmogorov and Smirnov: beyond 0.02 with a probability of 7e-4; a normal bias of any width is beyond 0.05.
    assert ((gates - margin) / (1 - 2 * margin) - steps).abs().max() <= 0.02


@pytest.mark.parametrize(("rule", "gate", "units"), UNITS)
def test_decays_start_within_the_bounds_for_their_units(rule, gate, units):
    """Units: the heads for one gate a head, the dimensions for one gate a dimension."""
    module = build(rule, 128, 8, feature_dim=6)
    for _ in range(100):
        gates = getattr(module, gate).bias.detach().sigmoid()
        assert gates.min() >= 1 / units - 1e-6 and gates.max() <= 1 - 1 / units + 1e-6
        assert gates.unique().numel() > 1
        module.reset_special_parameters()
    for num_heads in (1, 2):  # U(1/n, 1 - 1/n) is empty for n = 1, and a point for n = 2
        start = build("gated", num_heads=num_heads).gate_proj.bias.sigmoid()
        assert torch.equal(start, torch.full((num_heads,), 0.5))
