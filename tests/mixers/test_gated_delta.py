"""Gated DeltaNet, Kimi delta attention, DeltaProduct and DeltaNet: Hugging Face's numbers, padding, initial values."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.gated_delta import DeltaNet, DeltaProduct, GatedDelta, KimiDelta
from tests.mixers import contract

EMBED, HEADS = 12, 4
CASES = [
    (GatedDelta, {}),
    (GatedDelta, {"key_heads": 2, "key_dim": 5, "value_dim": 2, "conv": 3, "negative_eigenvalues": True}),
    (GatedDelta, {"bias": True, "conv": 2}),
    (GatedDelta, {"kv_heads": 2, "gate_rank": 3, "value_dim": 2}),
    (KimiDelta, {"conv": 1, "bias": True}),
    (KimiDelta, {"kv_heads": 1}),
    (KimiDelta, {"key_heads": 1, "key_dim": 6}),
    (DeltaProduct, {"writes": 1}),
    (DeltaProduct, {"key_heads": 2, "key_dim": 5, "bias": True}),
    (DeltaProduct, {"writes": 3, "negative_eigenvalues": True}),
    (DeltaProduct, {"kv_heads": 2, "bias": True, "gate_rank": 2}),
    (DeltaNet, {"eps": 0.5}),
    (DeltaNet, {"key_heads": 2, "key_dim": 5, "value_dim": 2, "gate": True, "negative_eigenvalues": True}),
]


def naive(mixer: GatedDelta, x: Tensor) -> Tensor:
    """A row of a text, (time, embed_dim), by the equations of the classes' docstrings, one number after the other."""
    n, K, V = mixer.writes, mixer.key_dim, mixer.value_dim
    share, kv = HEADS // mixer.key_heads, mixer.kv_heads
    projected = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], -1)
    S, rows = x.new_zeros(HEADS, K, V), []
    for t in range(len(x)):
        u = sum(mixer.conv1d.weight[:, 0, -1 - i] * projected[t - i] for i in range(min(t + 1, mixer.conv)))
        u = u * torch.sigmoid(u)
        q, keys, values = u.split([mixer.key_heads * K, n * (kv or mixer.key_heads) * K, n * (kv or HEADS) * V])
        q, keys, values = q.view(-1, K), keys.view(n, -1, K), values.view(n, -1, V)
        if kv:
            keys, values = (torch.stack([x[:, h * kv // HEADS] for h in range(HEADS)], 1) for x in (keys, values))
        q, *keys = ((k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()) for k in (q, *keys))
        betas = torch.sigmoid(mixer.b_proj(x[t])).view(n, HEADS) * (2 if mixer.negative_eigenvalues else 1)
        if isinstance(mixer, KimiDelta):
            gate = mixer.forget_gate
            steps = F.softplus(gate.f_b_proj(gate.f_a_proj(x[t])) + gate.dt_bias).view(HEADS, K)
            f = torch.exp(-gate.A_log.view(HEADS, 1).exp() * steps)
            read_gate = torch.sigmoid(mixer.g_b_proj(mixer.g_a_proj(x[t])))
        elif isinstance(mixer, DeltaNet):
            f, read_gate = x.new_ones(HEADS, 1), F.silu(mixer.g_proj(x[t])) if mixer.gate else 1
        else:
            f = torch.exp(-mixer.A_log.exp() * F.softplus(mixer.a_proj(x[t]) + mixer.dt_bias))[:, None]
            read_gate = F.silu(mixer.g_b_proj(mixer.g_a_proj(x[t])) if mixer.gate_rank else mixer.g_proj(x[t]))
        states = []
        for h in range(HEADS):
            state = f[h][:, None] * S[h]
            for k, v, beta in zip(keys, values, betas, strict=True):
                key = k[h // share]
                turn = torch.eye(K, dtype=x.dtype) - beta[h] * torch.outer(key, key)
                state = turn @ state + beta[h] * torch.outer(key, v[h])
            states.append(state)
        S = torch.stack(states)
        y = torch.stack([q[h // share] @ S[h] for h in range(HEADS)]) * K**-0.5
        y = mixer.o_norm.weight * y / (y.square().mean(-1, keepdim=True) + mixer.eps).sqrt()
        rows.append(mixer.o_proj(y.flatten() * read_gate))
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize(
    ("kind", "writes", "allowed"),
    [(GatedDelta, 2, "1 "), (KimiDelta, 2, "1 "), (GatedDelta, 0, "1 "), (DeltaProduct, 0, "at least 1")],
)
def test_more_writes_than_one_are_of_delta_product_alone(kind, writes, allowed):
    with pytest.raises(ValueError, match=f"^writes is {writes}; it must be {allowed}"):
        kind(EMBED, HEADS, writes=writes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "^kv_heads is 3; it must be a divisor of num_heads, 4"),
        ({"kv_heads": -1}, "^kv_heads is -1; it must be a divisor"),
        ({"kv_heads": 2, "key_heads": 2}, "^key_heads is 2; with kv_heads it must be num_heads, 4, or 0"),
        ({"gate_rank": -1}, "^gate_rank is -1; it must be at least 0"),
    ],
)
def test_heads_that_cannot_share_keys_and_negative_ranks_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GatedDelta(EMBED, HEADS, **options)


def test_settings_are_those_of_checkpoints_from_before_keys_were_shared():
    names = {"key_heads", "key_dim", "value_dim", "conv", "negative_eigenvalues", "eps"}
    assert set(GatedDelta(EMBED, HEADS, kv_heads=2, gate_rank=3).settings()) == names


@pytest.mark.parametrize("padding", ["none", "whole"])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_equations(kind, options, padding):
    torch.manual_seed(0)
    mixer = contract.spread(kind(EMBED, HEADS, **options))
    with ops.check_values(True):  # so that rules get only what they say that they take
        contract.check_definition(mixer, naive, contract.draw(9, EMBED), contract.paddings(9)[padding])


def test_of_them_deltanet_alone_never_forgets():
    assert [kind(EMBED, HEADS).concern_when_carried() for kind in (GatedDelta, KimiDelta, DeltaProduct)] == [None] * 3
    assert "never forgets" in (DeltaNet(EMBED, HEADS).concern_when_carried() or "")


@pytest.mark.parametrize("kind", [GatedDelta, KimiDelta, DeltaProduct])
def test_where_the_special_parameters_start(kind):
    torch.manual_seed(0)
    mixer = kind(64, 64, key_dim=4)
    decays = mixer.forget_gate if kind is KimiDelta else mixer
    rate, step = decays.A_log.exp(), F.softplus(decays.dt_bias)
    assert (1 if kind is KimiDelta else 0.01) <= rate.min() < 2 and 13 < rate.max() <= 16
    assert 0.001 <= step.min() < 0.002 and 0.05 < step.max() <= 0.1
    assert (mixer.o_norm.weight == 1).all()


def of_qwen3_next(theirs: nn.Module) -> dict[str, Tensor]:
    """Its fused projections taken apart: for each head of keys q, k, and the v and z of its heads of values."""
    share = theirs.num_v_heads // theirs.num_k_heads
    sizes = [theirs.head_k_dim, theirs.head_k_dim, share * theirs.head_v_dim, share * theirs.head_v_dim]
    fused = theirs.in_proj_qkvz.weight.unflatten(0, (theirs.num_k_heads, -1)).split(sizes, 1)
    q, k, v, z = (x.flatten(0, 1) for x in fused)
    b, a = (x.flatten(0, 1) for x in theirs.in_proj_ba.weight.unflatten(0, (theirs.num_k_heads, -1)).split(share, 1))
    projections = {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": z, "b_proj": b, "a_proj": a}
    same = {name: x for name, x in theirs.named_parameters() if name in ("A_log", "dt_bias", "conv1d.weight")}
    others = {"o_norm.weight": theirs.norm.weight, "o_proj.weight": theirs.out_proj.weight}
    return {f"{name}.weight": x for name, x in projections.items()} | same | others


SIZES = {"hidden_size": EMBED, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SIZES |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
SIZES |= {"linear_num_heads": 4, "linear_head_dim": 6, "linear_allow_neg_eigval": True, "rms_norm_eps": 1e-3}
THEIRS = [
    ("qwen3_next", "GatedDeltaNet", GatedDelta, {"key_heads": 2, "value_dim": 5, "eps": 1e-3}),
    ("olmo_hybrid", "GatedDeltaNet", GatedDelta, {"key_heads": 2, "value_dim": 5, "negative_eigenvalues": True}),
    ("kimi_linear", "DeltaAttention", KimiDelta, {"value_dim": 6, "eps": 1e-3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layer", "kind", "options"), THEIRS)
def test_it_is_hugging_faces_layer_with_its_weights(model, layer, kind, options):
    """Outputs, gradients, left padding, which alone theirs can have, and caches, from which either may go on."""
    transformers = pytest.importorskip("transformers")
    module, model_name = import_module(f"transformers.models.{model}.modeling_{model}"), model.title().replace("_", "")
    config = getattr(module, f"{model_name}Config")(**SIZES)
    torch.manual_seed(0)
    theirs, ours = getattr(module, model_name + layer)(config, 0), kind(EMBED, HEADS, key_dim=6, **options)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("A_log", "dt_bias", "norm.weight")):  # their float32 loses digits of strong decays
                parameter.uniform_(*(0.5, 1.5) if "norm" in name else (-3, 0))
    weights = of_qwen3_next(theirs) if model == "qwen3_next" else dict(theirs.named_parameters())
    x = contract.draw(70, EMBED).float().requires_grad_()
    padding = torch.zeros(contract.BATCH, 70, dtype=torch.bool)
    padding[0, :13] = padding[2, :68] = True
    leaves = dict(theirs.named_parameters()) | {"x": x}
    assert set(weights) == set(dict(ours.named_parameters()))
    for mask in (None, padding):
        real = torch.ones(70, contract.BATCH, dtype=torch.bool) if mask is None else ~mask.t()
        out = torch.func.functional_call(ours, weights, (x, None, mask))[0][real]
        expected = theirs(x.transpose(0, 1), attention_mask=None if mask is None else (~mask).long())
        expected = expected.transpose(0, 1)[real]
        assert contract.error(out, expected) <= 1e-5
        grads = (torch.autograd.grad(y.square().sum(), leaves.values()) for y in (out, expected))
        for name, mine, its in zip(leaves, *grads, strict=True):
            assert contract.error(mine, its) <= 1e-5, name
    ours.load_state_dict(weights)
    with torch.no_grad():
        cache, state, start = transformers.DynamicCache(config=config), None, 0
        for length in (60, 1, 5, 1, 1, 2):
            part = x[start : start + length]
            expected = theirs(part.transpose(0, 1), cache_params=cache).transpose(0, 1)
            out, state = ours(part, state)
            assert contract.error(out, expected) <= 1e-5
            kept, start = cache.layers[0], start + length
            assert contract.error(state["memory"], kept.recurrent_states[0]) <= 1e-5
            assert contract.error(state["conv"], kept.conv_states[0].transpose(1, 2)[:, -3:]) <= 1e-5
