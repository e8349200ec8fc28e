"""Fast weight attention and retention compute their papers' equations, also where numbers are large or texts long."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.feature_maps import FEATURE_MAPS
from fairseq_fastweights.mixers.linear_attention import LinearAttention
from fairseq_fastweights.mixers.registry import MIXERS, build_mixer, fast_weight_attention
from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from tests.mixers import contract
from tests.mixers.contract import error

TIME, EMBED, HEADS = 13, 16, 2  # steps enough for normalisers to change by an order of magnitude
RULES = (*UPDATE_RULES, "retention")
HALF = 2e-2  # a percent is seen: five roundings, and normalisation divides two rounded sums


def build(rule: str, feature_map: str, *normalization: str, width: int = EMBED, heads: int = HEADS, **options: Any):
    torch.manual_seed(0)
    settings = {"fast_weight_heads": heads, "feature_map": feature_map, "normalization": frozenset(normalization)}
    kinds = MIXERS if rule in MIXERS else {rule: fast_weight_attention(rule)}
    # FAVOR+ draws anew at every call in training, so only in evaluation can calls be compared.
    return build_mixer(rule, width, settings | options, kinds).eval()


# Features that can be negative are not normalised here: their sums come near zero, where no two ways to round agree.
POSITIVE = [name for name, kind in FEATURE_MAPS.items() if kind.positive]
NORMALIZED = [
    (rule, chosen)
    for rule in UPDATE_RULES
    for size in (1, 2, 3)
    for chosen in itertools.combinations(("sum", "attention", "removal"), size)
    if UPDATE_RULES[rule].corrects or "removal" not in chosen
]
CASES = [
    *((rule, feature_map, (), {}) for rule in RULES for feature_map in FEATURE_MAPS),
    *((rule, (2 * POSITIVE)[i % 4 + j], chosen, {}) for i, (rule, chosen) in enumerate(NORMALIZED) for j in (0, 1)),
    *((rule, "elu", (), {"bias": False, "scale_read_out": True, "feature_dim": 6}) for rule in RULES),
    ("retention", "identity", (), {"retention_value_dim": 5, "feature_dim": 4, "retention_eps": 0.5}),
    ("retention", "identity", (), {"retention_value_dim": 16, "retention_rms_norm": True, "retention_eps": 0.5}),
]


def turned(x: Tensor) -> Tensor:
    """Each pair (i, i + half) of dimensions as a complex number, times e^(i n theta) at position n."""
    half = x.shape[-1] // 2
    theta = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * theta
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([z.real, z.imag], dim=-1)


def papers_equations(module: LinearAttention, x: Tensor) -> Tensor:
    """A row of a text, (time, embed_dim), one step after another.

    W is (value, key) as in the papers: Schlag et al. 2021 ("S"), Mao 2022 ("M"), Sun et al. 2023 ("R").
    """
    if not len(x):
        return x
    rule = "retention" if isinstance(module, Retention) else module.update_rule
    normalization = module.normalization

    def heads(name):
        return getattr(module, f"{name}_proj")(x).unflatten(-1, (module.num_heads, -1))

    q, k = (y[0] for y in module.feature_map(heads("q")[None], heads("k")[None]))
    v = heads("v")
    if rule == "retention":  # R, Eq. 5: q_n gamma^n e^(i n theta), here the turns of it
        q, k = turned(q), turned(k)
    # Added wherever Eq. 28 and 29 divide by what can be exactly zero.
    eps = 1e-5 if type(module.feature_map).__name__ in ("ReluMap", "DpfpMap") else 0.0
    if "sum" in normalization:  # S, Eq. 29
        q = q / (q.sum(-1, keepdim=True) + eps)
        k = k / (k.sum(-1, keepdim=True) + eps)
    names = ("gate", "key_decay", "value_decay", "beta", "forget")
    g, f, d, beta, forget = (heads(name).sigmoid() if hasattr(module, f"{name}_proj") else None for name in names)
    W = torch.zeros(*v.shape[1:], k.shape[-1], dtype=x.dtype)
    z = torch.zeros(k.shape[1:], dtype=x.dtype)
    outputs = []
    for t in range(len(x)):
        write = v[t][..., :, None] * k[t][..., None, :]
        if rule == "sum":  # S, Eq. 17-18
            W, z = W + write, z + k[t]
        elif rule == "gated":  # M, Eq. 5
            keep = g[t][..., None]
            W, z = keep * W + (1 - keep) * write, g[t] * z + (1 - g[t]) * k[t]
        elif rule == "decay":  # M, Eq. 7; the normaliser is a value of 1 that does not decay
            W = d[t][..., :, None] * f[t][..., None, :] * W + write
            z = f[t] * z + k[t]
        elif rule == "retention":  # R, Eq. 6 and 8
            W = (1 - 2.0 ** (-5 - torch.arange(module.num_heads)))[:, None, None] * W + write
        else:
            if forget is not None:  # of fading_delta_rule
                W, z = forget[t][..., None, :] * W, forget[t] * z
            retrieved = (W * k[t][..., None, :]).sum(-1)  # S, Eq. 20
            if "removal" in normalization:  # S, Eq. 27; nothing is retrieved from nothing
                stored = (z * k[t]).sum(-1, keepdim=True)
                retrieved = torch.where(stored == 0, 0, retrieved / stored.masked_fill(stored == 0, 1))
            before = W
            if rule == "delta-mao":  # of M's kernel: (v - W k') k'^T with k' = beta k
                W = W + (beta[t] * (v[t] - beta[t] * retrieved))[..., :, None] * k[t][..., None, :]
            else:
                W = W + (beta[t] * (v[t] - retrieved))[..., :, None] * k[t][..., None, :]  # S, Eq. 24
            z = z + k[t]  # S, Eq. 26
        y = ((before if rule == "delta-mao" else W) * q[t][..., None, :]).sum(-1)  # S, Eq. 25
        if "attention" in normalization:  # S, Eq. 28
            y = y / ((z * q[t]).sum(-1, keepdim=True) + eps)
        if rule == "retention":  # R, Eq. 8, and "QK^T / sqrt(d)" of Sec. 2.2
            y = y / k.shape[-1] ** 0.5
            y = y if module.rms_norm else y - y.mean(-1, keepdim=True)
            y = y / (y.square().mean(-1, keepdim=True) + module.eps).sqrt()
            y = y * module.o_norm.weight if module.rms_norm else y
            y = y * heads("g")[t] * heads("g")[t].sigmoid()
        outputs.append(y)
    return module.out_proj(module.scale * torch.stack(outputs).flatten(-2))


@pytest.mark.parametrize(("rule", "feature_map", "normalization", "options"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_papers_equations(rule, feature_map, normalization, options):
    module = build(rule, feature_map, *normalization, **options).double()
    if options.get("retention_rms_norm"):
        torch.nn.init.uniform_(module.o_norm.weight, 0.5, 1.5)
    contract.check_definition(module, papers_equations, contract.draw(TIME, EMBED), None)


def fading_delta_rule(q, k, v, beta, log_forget, *, initial_state=None):
    """S' = f_t S_{t-1}, S_t = S' + beta_t (v_t - S' k_t) k_t^T, y_t = S_t q_t."""
    state, outs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if initial_state is None else initial_state, []
    for t in range(q.shape[1]):
        state = state * log_forget[:, t].reshape(*q.shape[:1], q.shape[2], -1, 1).exp()
        error = v[:, t] - (k[:, t, ..., None] * state).sum(-2)
        state = state + k[:, t, ..., None] * (beta[:, t, :, None] * error)[..., None, :]
        outs.append((q[:, t, ..., None] * state).sum(-2))
    return torch.stack(outs, dim=1), state


@pytest.mark.parametrize("normalization", ["attention", "attention,removal", "sum,removal"])
@pytest.mark.parametrize("per", ["head", "key"])
def test_the_normaliser_of_a_rule_that_corrects_and_decays_decays_too(per, normalization, monkeypatch):
    """A rule of one's own, of which there is a reference alone."""
    gates = ops.Gate("beta", per="head"), ops.Gate("log_forget", per=per, log=True)
    rule = ops.Rule(
        "fading", gates, fading_delta_rule, corrects=True, feature_map="elu", normalization=frozenset({"attention"})
    )
    monkeypatch.setitem(UPDATE_RULES, "fading", rule)
    module, x = build("fading", "elu", *normalization.split(",")).double(), contract.draw(TIME, EMBED)
    contract.check_definition(module, papers_equations, x, None)
    contract.check_parts(module, x, contract.paddings(TIME)["within"])


def halved(module: LinearAttention, x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """A module's outputs in float16, and in float32 with the same numbers; if the former's gradients are finite."""
    low = copy.deepcopy(module).half()
    out = low(x.half())[0]
    grads = torch.autograd.grad(out.sum(), list(low.parameters()))
    return out, copy.deepcopy(low).float()(x.half().float())[0], all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(("rule", "feature_map"), [("sum", "elu"), ("sum", "dpfp"), ("gated", "elu"), ("sum", "favor")])
def test_the_normaliser_of_a_long_text_does_not_overflow_float16(rule, feature_map):
    """z_t . q_t grows by 160 a step, past float16's 65,504 after 400 (Mao 2022, App. A keeps it in float32)."""
    module = build(rule, feature_map, "attention", width=128, heads=1)
    out, exact, finite = halved(module, contract.draw(600, 128, batch=1).float())
    assert error(out[-50:], exact[-50:]) <= HALF and finite


@pytest.mark.parametrize("rule", ["sum", "delta"])
@pytest.mark.parametrize("scale", [1.0, 6.0, 10.0, 20.0, 1000.0])
def test_long_queries_and_keys_of_favor_leave_gradients_finite(rule, scale):
    """Features of e^-(|x|^2 / 2) and smaller, divided by their sums."""
    normalization = UPDATE_RULES[rule].normalization
    module = build(rule, "favor", *normalization, width=128, heads=4, favor_features=64).train()
    x = (scale * contract.draw(16, 128, batch=8)).float().requires_grad_()
    out, _ = module(x)
    assert out.isfinite().all() and (rule == "sum" or out.abs().max() > 1e-3 * scale)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), [x, *module.parameters()]))


def test_long_queries_of_favor_do_not_vanish():
    """Attention normalisation divides out what their features, of e^-150, have in common."""
    module = build("sum", "favor", "attention").double()
    module.q_proj.weight.data.mul_(15)
    contract.check_definition(module, papers_equations, contract.draw(TIME, EMBED), None)


@pytest.mark.parametrize("normalization", [(), ("attention",)], ids=str)
def test_large_features_of_favor_do_not_overflow_float16(normalization):
    """Sums of queries are beyond 65,504, though the read-out that they come to is not."""
    module, x = build("gated", "favor", *normalization), contract.draw(TIME, EMBED).float()
    feature = module.feature_map.features[0]
    feature.mul_(28**0.5 / feature.norm())  # exp(14) / sqrt(34) = 2e5
    with torch.no_grad():
        module.q_proj.weight.mul_(0.1)
        module.k_proj.weight.mul_(0.1)
        module.q_proj.bias.copy_(feature.repeat(HEADS) * len(feature) ** 0.25)  # phi is largest at a feature itself
        module.v_proj.weight.mul_(1e-3)
        module.v_proj.bias.zero_()
    q, _ = module.feature_map(*[module.q_proj(x).unflatten(-1, (HEADS, -1))] * 2)
    assert q.max() > 65_504, "the test does not test what it says"
    out, exact, finite = halved(module, x)
    assert out.isfinite().all() and error(out, exact) <= HALF
    assert finite or not normalization  # without it the gradient of v is what leaves the range, for any computation
