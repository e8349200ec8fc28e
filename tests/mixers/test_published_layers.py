"""Mamba and the gated delta networks are Hugging Face's layers, and start as their papers say."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.mixers.gated_delta import DeltaProduct, GatedDelta, KimiDelta
from fairseq_fastweights.mixers.mamba import Mamba
from tests.mixers import contract

EMBED, HEADS, TIME = 12, 4, 23


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"expand": 1, "conv_kernel": 3, "use_bias": True}, {"time_step_rank": 3}], ids=str
)
def test_mamba_is_hugging_faces_layer_with_its_weights(options):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=EMBED, state_size=6, num_hidden_layers=1, **options)
    theirs = MambaMixer(config, layer_idx=0).eval()
    with torch.no_grad():
        theirs.conv1d.bias.normal_()
    sizes = {"conv": config.conv_kernel, "expansion": config.expand, "dt_rank": config.time_step_rank}
    ours = Mamba(EMBED, state=6, bias=config.use_bias, **sizes)
    initial = {name: x.clone() for name, x in ours.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    x = contract.draw(TIME, EMBED).float()
    torch.testing.assert_close(ours(x)[0], theirs(x.transpose(0, 1)).transpose(0, 1), rtol=1e-5, atol=1e-6)
    for name in ("A_log", "D"):  # it starts as theirs, but for steps, which are drawn
        torch.testing.assert_close(initial[name], theirs.state_dict()[name])


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
def test_a_delta_network_is_hugging_faces_layer_with_its_weights(model, layer, kind, options):
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


@pytest.mark.parametrize("kind", [GatedDelta, KimiDelta, DeltaProduct])
def test_where_rates_and_steps_of_delta_networks_start(kind):
    torch.manual_seed(0)
    mixer = kind(64, 64, key_dim=4)
    decays = mixer.forget_gate if kind is KimiDelta else mixer
    rate, step = decays.A_log.exp(), F.softplus(decays.dt_bias)
    assert (1 if kind is KimiDelta else 0.01) <= rate.min() < 2 and 13 < rate.max() <= 16
    assert 0.001 <= step.min() < 0.002 and 0.05 < step.max() <= 0.1
    assert (mixer.o_norm.weight == 1).all()


def test_where_the_special_parameters_of_mamba_start():
    torch.manual_seed(0)
    mixer = Mamba(20, state=5, expansion=500).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
    mixer.reset_special_parameters()
    torch.testing.assert_close(mixer.A_log.exp()[3], torch.arange(1.0, 6, dtype=torch.float64))
    assert (mixer.D == 1).all()
    step = F.softplus(mixer.dt_proj.bias)
    assert 0.001 <= step.min() < 0.00101 and 0.099 < step.max() <= 0.1
    assert 0.5 < mixer.dt_proj.weight.abs().max() * mixer.dt_rank**0.5 <= 1
