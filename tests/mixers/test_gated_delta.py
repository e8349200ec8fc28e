"""Gated DeltaNet, Kimi delta attention and DeltaProduct: Hugging Face's numbers, any parts, padding, half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.mixers.gated_delta import DeltaProduct, GatedDelta, KimiDelta
from fairseq_fastweights.mixers.mixer import Mixer
from tests.mixers import contract

EMBED, HEADS, TIME = 12, 4, 23
CASES = [
    (GatedDelta, {}),
    (GatedDelta, {"key_heads": 2, "key_dim": 5, "value_dim": 2, "conv": 3, "negative_eigenvalues": True}),
    (KimiDelta, {"conv": 1}),
    (KimiDelta, {"key_heads": 1, "key_dim": 6}),
    (DeltaProduct, {"key_heads": 2, "key_dim": 5}),
    (DeltaProduct, {"writes": 3, "negative_eigenvalues": True}),
]
cases = pytest.mark.parametrize(("kind", "options"), CASES, ids=str)


def build(kind: type[GatedDelta], options: dict, seed: int = 0) -> GatedDelta:
    """One whose parameters all matter: without zeros or equal numbers."""
    torch.manual_seed(seed)
    mixer = kind(EMBED, HEADS, **options).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return mixer


def naive(mixer: GatedDelta, x: Tensor) -> Tensor:
    """A row of a text, (time, embed_dim), by the equations of the classes' docstrings, one number after the other."""
    n, K, V = mixer.writes, mixer.key_dim, mixer.value_dim
    share = HEADS // mixer.key_heads
    projected = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], -1)
    kimi = isinstance(mixer, KimiDelta)
    S = x.new_zeros(HEADS, K, V)
    rows = []
    for t in range(len(x)):
        u = sum(mixer.conv1d.weight[:, 0, -1 - i] * projected[t - i] for i in range(min(t + 1, mixer.conv)))
        u = u * torch.sigmoid(u)
        q, *keys = u[: (1 + n) * mixer.key_heads * K].view(1 + n, mixer.key_heads, K)
        values = u[(1 + n) * mixer.key_heads * K :].view(n, HEADS, V)
        q, *keys = ((k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()) for k in (q, *keys))
        betas = torch.sigmoid(mixer.b_proj(x[t])).view(n, HEADS) * (2 if mixer.negative_eigenvalues else 1)
        if kimi:
            gate = mixer.forget_gate
            steps = F.softplus(gate.f_b_proj(gate.f_a_proj(x[t])) + gate.dt_bias).view(HEADS, K)
            f = torch.exp(-gate.A_log.view(HEADS, 1).exp() * steps)
            read_gate = torch.sigmoid(mixer.g_b_proj(mixer.g_a_proj(x[t])))
        else:
            f = torch.exp(-mixer.A_log.exp() * F.softplus(mixer.a_proj(x[t]) + mixer.dt_bias))[:, None]
            read_gate = F.silu(mixer.g_proj(x[t]))
        states = []
        for h in range(HEADS):
            state = f[h][:, None] * S[h]
            for k, v, beta in zip(keys, values, betas, strict=True):
                key = k[h // share]
                state = state + beta[h] * torch.outer(key, v[h] - key @ state)
            states.append(state)
        S = torch.stack(states)
        y = torch.stack([q[h // share] @ S[h] for h in range(HEADS)]) * K**-0.5
        y = mixer.o_norm.weight * y / (y.square().mean(-1, keepdim=True) + mixer.eps).sqrt()
        rows.append(mixer.o_proj(y.flatten() * read_gate))
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize("padding", ["none", "within", "whole"])
@cases
def test_outputs_and_gradients_are_those_of_the_equations(kind, options, padding):
    contract.check_definition(build(kind, options), naive, contract.draw(9, EMBED), contract.paddings(9)[padding])


@pytest.mark.parametrize("padding", ["none", "within", "whole"])
@cases
def test_a_text_in_parts_is_the_text(kind, options, padding):
    contract.check_parts(build(kind, options), contract.draw(TIME, EMBED), contract.paddings(TIME)[padding])


@cases
def test_states_and_the_gradients_through_them(kind, options):
    mixer, x = build(kind, options), contract.draw(9, EMBED)
    contract.check_state(mixer, x)
    contract.check_gradients_through_the_state(mixer, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@cases
def test_half_types(kind, options, dtype):
    contract.check_half(build(kind, options), naive, contract.draw(9, EMBED), dtype)


def test_micro_steps_compose_to_one_of_gated_delta():
    """With one correction for each token DeltaProduct is Gated DeltaNet, parameters and all."""
    one, other = build(DeltaProduct, {"writes": 1}), build(GatedDelta, {})
    one.load_state_dict(other.state_dict())
    x = contract.draw(TIME, EMBED)
    torch.testing.assert_close(one(x)[0], other(x)[0])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GatedDelta, {"key_heads": 3}, "key_heads is 3; it must be a divisor of num_heads, 4, or 0"),
        (GatedDelta, {"key_heads": -1}, "key_heads is -1; it must be"),
        (GatedDelta, {"key_dim": -1}, "key_dim is -1; it must be at least 0"),
        (KimiDelta, {"value_dim": -2}, "value_dim is -2; it must be at least 0"),
        (KimiDelta, {"conv": 0}, "conv is 0; it must be at least 1"),
        (KimiDelta, {"backend": "fast"}, "backend is 'fast'; it must be one of auto"),
        (DeltaProduct, {"eps": -1.0}, "eps is -1.0; it must be at least 0"),
        (DeltaProduct, {"writes": 0}, "writes is 0; it must be at least 1"),
    ],
)
def test_bad_options_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(EMBED, HEADS, **options)


@pytest.mark.parametrize("kind", [GatedDelta, KimiDelta, DeltaProduct])
def test_where_the_special_parameters_start(kind):
    torch.manual_seed(0)
    mixer = kind(64, 64, key_dim=4)
    decays = mixer.forget_gate if kind is KimiDelta else mixer
    rate, step = decays.A_log.exp(), F.softplus(decays.dt_bias)
    assert 0.01 <= rate.min() < 2 and 13 < rate.max() <= 16
    assert 0.001 <= step.min() < 0.002 and 0.05 < step.max() <= 0.1
    assert (mixer.o_norm.weight == 1).all()


# The layers of Hugging Face's models, with their weights.


def of_qwen3_next(theirs: nn.Module) -> dict[str, Tensor]:
    """Its fused projections taken apart: for each head of keys q, k, and the v and z of its heads of values."""
    share = theirs.num_v_heads // theirs.num_k_heads
    sizes = [theirs.head_k_dim, theirs.head_k_dim, share * theirs.head_v_dim, share * theirs.head_v_dim]
    fused = theirs.in_proj_qkvz.weight.unflatten(0, (theirs.num_k_heads, -1)).split(sizes, 1)
    q, k, v, z = (x.flatten(0, 1) for x in fused)
    b, a = (x.flatten(0, 1) for x in theirs.in_proj_ba.weight.unflatten(0, (theirs.num_k_heads, -1)).split(share, 1))
    projections = {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": z, "b_proj": b, "a_proj": a}
    same = {name: x for name, x in theirs.state_dict().items() if name in ("A_log", "dt_bias", "conv1d.weight")}
    others = {"o_norm.weight": theirs.norm.weight, "o_proj.weight": theirs.out_proj.weight}
    return {f"{name}.weight": x for name, x in projections.items()} | same | others


def qwen3_next() -> tuple[nn.Module, Mixer, dict[str, Tensor]]:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6}
    config = module.Qwen3NextConfig(
        hidden_size=EMBED, num_hidden_layers=1, layer_types=["linear_attention"], linear_value_head_dim=5, **sizes
    )
    theirs = module.Qwen3NextGatedDeltaNet(config, 0)
    ours = GatedDelta(EMBED, 4, key_heads=2, key_dim=6, value_dim=5, eps=config.rms_norm_eps)
    return theirs, ours, of_qwen3_next(theirs)


def olmo_hybrid() -> tuple[nn.Module, Mixer, dict[str, Tensor]]:
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as module

    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 6}
    config = module.OlmoHybridConfig(
        hidden_size=EMBED,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_value_head_dim=5,
        linear_allow_neg_eigval=True,
        **sizes,
    )
    theirs = module.OlmoHybridGatedDeltaNet(config, 0)
    return theirs, GatedDelta(EMBED, 4, key_dim=6, value_dim=5, negative_eigenvalues=True), theirs.state_dict()


def kimi_linear() -> tuple[nn.Module, Mixer, dict[str, Tensor]]:
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    config = module.KimiLinearConfig(
        hidden_size=EMBED,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_heads=4,
        linear_head_dim=6,
    )
    theirs = module.KimiLinearDeltaAttention(config, 0)
    with torch.no_grad():
        theirs.forget_gate.A_log.uniform_(0.01, 2)
        theirs.forget_gate.dt_bias.normal_()
    return theirs, KimiDelta(EMBED, 4, key_dim=6, value_dim=6, eps=config.rms_norm_eps), theirs.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("make", [qwen3_next, olmo_hybrid, kimi_linear])
def test_it_computes_what_hugging_faces_does_with_its_weights(make):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs, ours, weights = make()
    ours.load_state_dict(weights)
    x = contract.draw(70, EMBED).float()
    with torch.no_grad():
        expected = theirs(x.transpose(0, 1)).transpose(0, 1)
        assert contract.error(ours(x)[0], expected) <= 1e-5
        steps, _ = contract.in_parts(ours, x, [60, *[1] * 10], None, overwrite=True)
        assert contract.error(steps, expected) <= 1e-5
