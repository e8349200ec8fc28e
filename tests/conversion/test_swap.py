"""Linear attention in the place of softmax attention starts where Mao (2022) says; also with grouped heads."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_fastweights.conversion.transfer.swap import check_swap, fold_map, swap
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention

WIDTH, HEADS, DIM = 24, 4, 8
WHOLE: dict[str, Any] = {"kv_heads": HEADS, "head_dim": DIM, "projection_bias": "all"}
GROUPED: dict[str, Any] = {"kv_heads": 2, "head_dim": DIM, "projection_bias": "none"}
PROJECTIONS = ("q_proj.", "k_proj.", "v_proj.")
NORMS = {"query_key_norm_eps": 1e-3}
X = torch.randn(7, 2, WIDTH, generator=torch.Generator().manual_seed(2))
PLAIN: dict[str, Any] = {"update_rule": "sum", "feature_map": "identity", "normalization": frozenset()}


@pytest.fixture(params=[WHOLE, GROUPED], ids=["whole", "grouped"])
def shape(request) -> dict[str, Any]:
    return request.param


def attention(shape: dict[str, Any], **options: Any) -> SoftmaxAttention:
    torch.manual_seed(0)
    made = SoftmaxAttention(WIDTH, HEADS, **shape, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def swapped(
    base: SoftmaxAttention, shape: dict[str, Any], **options: Any
) -> tuple[FastWeightAttention, dict[str, str]]:
    """Linear attention with these weights, and how each of its parameters was made."""
    torch.manual_seed(1)
    new = FastWeightAttention(WIDTH, HEADS, **shape, **options)
    check_swap(new)
    starts = swap(new, {n: p.detach() for n, p in base.named_parameters() if not n.startswith("out_proj.")})
    with torch.no_grad():
        for name, (values, _) in starts.items():
            assert values.shape == new.get_parameter(name).shape
            new.get_parameter(name).copy_(values)
        new.out_proj.load_state_dict(base.out_proj.state_dict())
    return new, {name: how for name, (_, how) in starts.items()}


def heads(projection: torch.nn.Module, x: Tensor, size: int = DIM) -> Tensor:
    return projection(x).unflatten(-1, (-1, size))


@pytest.mark.parametrize("norms", [{}, NORMS], ids=["", "norms"])
@torch.no_grad()
def test_at_full_size_a_layer_is_linear_attention_of_the_projections(shape, norms):
    base = attention(shape, **norms)
    new, how = swapped(base, shape, **PLAIN, **norms)
    assert set(how.values()) == {"kept", "rescaled"}
    assert {name for name, kind in how.items() if kind == "rescaled"} == {n for n in how if n.startswith("v_proj.")}
    q, k, v = (heads(projection, X) for projection in (base.q_proj, base.k_proj, base.v_proj))
    q, k = base.q_norm(q), base.k_norm(k)
    k, v = (x.repeat_interleave(HEADS // shape["kv_heads"], dim=2) for x in (k, v))
    weights = torch.einsum("tbhd,jbhd->bhtj", q, k).tril() / 512
    expected = base.out_proj(torch.einsum("bhtj,jbhd->tbhd", weights, v).flatten(2))
    assert torch.allclose(new(X)[0], expected, rtol=1e-4, atol=1e-5)  # sums in another order


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"update_rule": "decay"}, None),  # see below
        ({**PLAIN, "feature_map": "relu"}, 1 / 512),
        ({"update_rule": "sum", "feature_map": "relu", "feature_dim": 30, "normalization": frozenset({"sum"})}, 1),
        ({"update_rule": "sum", "feature_map": "favor", "favor_features": 20}, 1),
        ({"update_rule": "gated", "feature_map": "tanh", "feature_dim": DIM}, 1),
        ({"update_rule": "delta", "feature_map": "dpfp", "dpfp_nu": 2}, 1),
    ],
)
def test_queries_keys_and_values_are_kept_or_multiplied_and_all_else_stays(options, factor):
    base = attention(WHOLE)
    new, how = swapped(base, WHOLE, **options)
    torch.manual_seed(1)
    fresh = FastWeightAttention(WIDTH, HEADS, **WHOLE, **options)
    for name, parameter in new.named_parameters():
        if name.startswith(("q_proj.", "k_proj.")):
            assert torch.equal(parameter, base.get_parameter(name)) and how[name] == "kept"
        elif name.startswith("v_proj.") and factor is not None:
            assert torch.equal(parameter, base.get_parameter(name) * factor)
            assert how[name] == ("kept" if factor == 1 else "rescaled")
        elif not name.startswith(("v_proj.", "beta_proj.", "out_proj.")):
            assert torch.equal(parameter, fresh.get_parameter(name)) and name not in how


@pytest.mark.parametrize("m", [1, 4, 7])
def test_the_folded_map_keeps_as_much_of_queries_and_keys_as_any(shape, m):
    """Heads that share keys share the map; projections and biases go through it, whatever the feature map."""
    base, kv_heads = attention(shape), shape["kv_heads"]
    q, k = base.q_proj.weight.detach(), base.k_proj.weight.detach()
    fold = fold_map(q, k, HEADS, m)
    identity = torch.eye(m, dtype=torch.float64).expand(kv_heads, m, m)
    assert fold.shape == (kv_heads, m, DIM) and torch.allclose(fold @ fold.transpose(1, 2), identity, atol=1e-12)
    for head in range(kv_heads):
        queries = q.chunk(kv_heads)[head].unflatten(0, (-1, DIM)).transpose(0, 1).flatten(1)
        both = torch.cat([queries, k.chunk(kv_heads)[head]], dim=1).double()
        kept = (fold[head] @ both).norm() ** 2
        # Of all maps with m orthonormal rows, by the theorem of Eckart and Young.
        assert torch.allclose(kept, torch.linalg.svdvals(both)[:m].square().sum(), rtol=1e-10)
    # A singular vector's sign is open; maps that are not linear would notice.
    assert (fold.gather(-1, fold.abs().argmax(-1, keepdim=True)) > 0).all()
    for feature_map, name in itertools.product(("identity", "elu", "tanh"), ("q_proj", "k_proj")):
        new, how = swapped(base, shape, update_rule="gated", feature_map=feature_map, feature_dim=m)
        assert {kind for n, kind in how.items() if n.startswith(name)} == {"folded"}
        projected = heads(base.get_submodule(name), X)
        maps = fold.float().repeat_interleave(projected.shape[2] // kv_heads, dim=0)
        expected = torch.einsum("hmd,tbhd->tbhm", maps, projected)
        assert torch.allclose(heads(new.get_submodule(name), X, m), expected, atol=1e-5)


def test_the_decay_rules_values_are_gated_and_betas_are_small(shape):
    base = attention(shape)
    new, how = swapped(base, shape, update_rule="decay", feature_dim=4)
    gate = new.value_decay_proj.bias
    # Spread over [1/n, 1 - 1/n], n = 8: neither all open nor all shut.
    assert gate.sigmoid().min() >= 1 / DIM - 1e-6 and gate.sigmoid().max() <= 1 - 1 / DIM + 1e-6 and gate.std() > 0.3
    factor = (1 - gate.sigmoid()).view(shape["kv_heads"], -1, DIM).mean(1).flatten()
    assert torch.allclose(new.v_proj(X), factor * base.v_proj(X), rtol=1e-5, atol=1e-6)
    assert how["v_proj.weight"] == "rescaled"
    # The delta rule starts with a small beta.
    for rule in ("delta", "delta-mao"):
        new, how = swapped(base, shape, update_rule=rule)
        beta = new.beta_proj(X).sigmoid()
        assert torch.allclose(beta, torch.full_like(beta, 0.007), rtol=1e-5)
        assert how["beta_proj.weight"] == how["beta_proj.bias"] == "new"


def test_longer_keys_and_a_delta_rule_without_biases_are_refused():
    def check(**options: Any) -> None:
        check_swap(FastWeightAttention(WIDTH, HEADS, head_dim=DIM, **options))

    for name in ("identity", "elu", "tanh"):
        with pytest.raises(ValueError, match=rf"feature_dim is 9; with the feature map {name} .* at most the 8"):
            check(update_rule="gated", feature_map=name, feature_dim=9)
    for rule in ("delta", "delta-mao"):
        with pytest.raises(ValueError, match=r"no_attention_bias is set.*0.007"):
            check(update_rule=rule, bias=False)
    with pytest.raises(ValueError, match="feature_dim is 3; with query_key_norm_eps it must be the 8 numbers"):
        check(update_rule="gated", feature_dim=3, **NORMS)
    check(update_rule="decay", bias=False)
