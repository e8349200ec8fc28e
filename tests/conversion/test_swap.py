"""A fast weight memory that takes the place of softmax attention starts where Mao (2022) says."""

import itertools

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.conversion.transfer.swap import check_swap, fold_map, swap
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention

WIDTH, HEADS, DIM = 24, 3, 8
PROJECTIONS = ("q_proj.", "k_proj.", "v_proj.")
X = torch.randn(7, 2, WIDTH, generator=torch.Generator().manual_seed(2))
PLAIN = {"update_rule": "sum", "feature_map": "identity", "normalization": frozenset()}


@pytest.fixture
def source() -> MultiheadAttention:
    torch.manual_seed(0)
    attention = MultiheadAttention(WIDTH, HEADS, self_attention=True)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)  # fairseq's biases start at 0
    return attention


def memory(**options) -> FastWeightAttention:
    torch.manual_seed(1)
    return FastWeightAttention(WIDTH, HEADS, **options)


def swapped(source: MultiheadAttention, **options) -> tuple[FastWeightAttention, dict[str, str]]:
    """A memory with the source's weights, and how each of its parameters was made."""
    new = memory(**options)
    check_swap(new)
    starts = swap(new, {name: p.detach() for name, p in source.named_parameters() if name.startswith(PROJECTIONS)})
    with torch.no_grad():
        for name, (values, _) in starts.items():
            assert values.shape == new.get_parameter(name).shape
            new.get_parameter(name).copy_(values)
        new.out_proj.load_state_dict(source.out_proj.state_dict())
    return new, {name: how for name, (_, how) in starts.items()}


def heads(projection: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return projection(x).view(*x.shape[:2], HEADS, -1)


def test_at_full_size_a_layer_is_linear_attention_of_the_projections(source):
    new, how = swapped(source, **PLAIN)
    kinds = ("weight", "bias")
    assert how == {f"{name}{kind}": "rescaled" if "v" in name else "kept" for name in PROJECTIONS for kind in kinds}
    q, k, v = (heads(projection, X) for projection in (source.q_proj, source.k_proj, source.v_proj))
    read = torch.zeros(7, 2, HEADS, DIM)
    for t in range(7):
        for j in range(t + 1):
            read[t] += (q[t] * k[j]).sum(-1, keepdim=True) * v[j] / 512
    # Sums in another order.
    assert torch.allclose(new(X)[0], source.out_proj(read.reshape(7, 2, WIDTH)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"update_rule": "decay"}, None),  # of which see below
        ({**PLAIN, "feature_map": "relu"}, 1 / 512),
        ({"update_rule": "sum", "feature_map": "relu", "feature_dim": 30, "normalization": frozenset({"sum"})}, 1),
        ({"update_rule": "sum", "feature_map": "favor", "favor_features": 20}, 1),
        ({"update_rule": "gated", "feature_map": "tanh", "feature_dim": DIM}, 1),
        ({"update_rule": "delta", "feature_map": "dpfp", "dpfp_nu": 2}, 1),
    ],
)
def test_queries_keys_and_values_are_kept_or_multiplied_and_all_else_stays(source, options, factor):
    fresh, (new, how) = memory(**options), swapped(source, **options)
    for name, parameter in new.named_parameters():
        if name.startswith(("q_proj.", "k_proj.")):
            assert torch.equal(parameter, source.get_parameter(name)) and how[name] == "kept"
        elif name.startswith("v_proj.") and factor is not None:
            assert torch.equal(parameter, source.get_parameter(name) * factor)
            assert how[name] == ("kept" if factor == 1 else "rescaled")
        elif not name.startswith(("v_proj.", "beta_proj.", "out_proj.")):
            assert torch.equal(parameter, fresh.get_parameter(name)) and name not in how


@pytest.mark.parametrize("m", [1, 4, 7])
def test_the_folded_map_keeps_as_much_of_queries_and_keys_as_any(source, m):
    """And both go through it, with their biases, whatever the feature map."""
    q, k = source.q_proj.weight.detach(), source.k_proj.weight.detach()
    fold = fold_map(q, k, HEADS, m)
    identity = torch.eye(m, dtype=torch.float64).expand(HEADS, m, m)
    assert fold.shape == (HEADS, m, DIM) and torch.allclose(fold @ fold.transpose(1, 2), identity, atol=1e-12)
    for head in range(HEADS):
        rows = slice(head * DIM, (head + 1) * DIM)
        both = torch.cat([q[rows], k[rows]], dim=1).double()
        kept = (fold[head] @ both).norm() ** 2
        # Of all maps with m orthonormal rows, by the theorem of Eckart and Young.
        assert torch.allclose(kept, torch.linalg.svdvals(both)[:m].square().sum(), rtol=1e-10)
    # A singular vector's sign is open; maps that are not linear would notice.
    assert (fold.gather(-1, fold.abs().argmax(-1, keepdim=True)) > 0).all()
    for feature_map, name in itertools.product(("identity", "elu", "tanh"), ("q_proj", "k_proj")):
        new, how = swapped(source, update_rule="gated", feature_map=feature_map, feature_dim=m)
        assert how[f"{name}.weight"] == how[f"{name}.bias"] == "folded"
        expected = torch.einsum("hmd,tbhd->tbhm", fold.float(), heads(source.get_submodule(name), X))
        assert torch.allclose(heads(new.get_submodule(name), X), expected, atol=1e-5)


def test_the_decay_rules_values_are_gated_and_strengths_are_small(source):
    new, how = swapped(source, update_rule="decay", feature_dim=4)
    gate = new.value_decay_proj.bias
    # Spread over [1/n, 1 - 1/n], n = 8: neither all open nor all shut.
    assert gate.sigmoid().min() >= 1 / DIM - 1e-6 and gate.sigmoid().max() <= 1 - 1 / DIM + 1e-6 and gate.std() > 0.3
    factor = 1 - 1 / (1 + torch.exp(-gate))
    assert torch.allclose(new.v_proj(X), factor * source.v_proj(X), rtol=1e-5, atol=1e-6)
    assert how["v_proj.weight"] == how["v_proj.bias"] == "rescaled"
    # Attention without biases is swapped too.
    weights = {name: p for name, p in source.named_parameters() if name.startswith(PROJECTIONS) and "weight" in name}
    assert swap(memory(update_rule="decay", feature_dim=4, bias=False), weights).keys() == weights.keys()
    # The delta rule starts to write with little strength.
    for rule in ("delta", "delta-mao"):
        new, how = swapped(source, update_rule=rule)
        strength = new.beta_proj(X).sigmoid()
        assert torch.allclose(strength, torch.full_like(strength, 0.007), rtol=1e-5)
        assert how["beta_proj.weight"] == how["beta_proj.bias"] == "new"


def test_longer_keys_and_a_delta_rule_without_biases_are_refused():
    for name in ("identity", "elu", "tanh"):
        with pytest.raises(ValueError, match=rf"feature_dim is 9; with the feature map {name} .* at most the 8"):
            check_swap(memory(update_rule="gated", feature_map=name, feature_dim=9))
    with pytest.raises(ValueError, match=r"no_attention_bias is set.*0.007"):
        check_swap(memory(update_rule="delta-mao", bias=False))
    with pytest.raises(ValueError, match=r"no_attention_bias is set.*0.007"):
        check_swap(memory(update_rule="delta", bias=False))
    check_swap(memory(update_rule="decay", bias=False))
