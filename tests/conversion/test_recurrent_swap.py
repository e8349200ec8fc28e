"""Gated delta networks, Mamba and window-sum in place of a trained attention: they start near it and learn it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.conversion.transfer import recurrent_swap
from fairseq_fastweights.conversion.transfer.base_model import read_base_model
from fairseq_fastweights.conversion.transfer.recurrent_swap import (
    AVERAGED,
    BETA,
    KEPT,
    READ,
    check_recurrent,
    swap_recurrent,
)
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import build_mixer, option_name
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.tasks.attention_transfer_criterion import AttentionTransfer
from tests.conversion.transfers import PRE_NORM, make_source, save_as_today, take
from tests.mixers import contract

WIDTH, HEADS, DIM = 32, 4, 8
RECURRENT = ("gated-delta", "kimi-delta", "delta-product", "mamba")
SHAPE = {"kv_heads": 2, "query_key_norm_eps": 1e-5}


@pytest.fixture(scope="module")
def attention() -> SoftmaxAttention:
    torch.manual_seed(0)
    made = SoftmaxAttention(WIDTH, HEADS, **SHAPE)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(mean=0.0 if parameter.dim() > 1 else 0.3, std=0.3)
        for norm in (made.q_norm, made.k_norm):
            norm.weight.copy_(torch.linspace(0.5, 2, DIM))
    return made.double()


def build(name: str, bias: bool, **options: Any) -> Mixer:
    torch.manual_seed(1)
    return build_mixer(name, WIDTH, {"fast_weight_heads": HEADS, option_name(name, "bias"): bias, **options})


def swapped(attention: SoftmaxAttention, name: str, bias: bool = True, gain: Tensor | None = None, **options) -> Mixer:
    mixer = build(name, bias, **options).double()
    check_recurrent(mixer, HEADS, HEADS * DIM, SHAPE["kv_heads"] * DIM)
    weights = {n: p.detach() for n, p in attention.named_parameters()}
    with torch.no_grad():
        for parameter, (values, _) in swap_recurrent(mixer, weights, HEADS, gain).items():
            mixer.get_parameter(parameter).copy_(values)
    return mixer


@pytest.fixture
def linear(monkeypatch) -> None:
    """Values so small that silu is linear."""
    monkeypatch.setattr(recurrent_swap, "NEARLY_LINEAR", 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "gate_rank": 3}], ids=["repeated", "shared"])
@pytest.mark.parametrize("name", RECURRENT[:3])
def test_a_gated_delta_network_reads_the_projections_with_open_gates(attention, linear, name, options):
    """Its output by its equations, from the attention's own projections."""
    exact = {option_name(name, option): x for option, x in {"eps": 1e-15, **options}.items()}
    negative = {option_name(name, "negative_eigenvalues"): True} if name == "delta-product" else {}
    mixer, x = swapped(attention, name, **negative, **exact), torch.randn(6, WIDTH, dtype=torch.float64)
    projected, sizes = {}, {}
    for n in "qkv":
        weight, bias = (p.unflatten(0, (-1, DIM)) for p in attention.get_submodule(f"{n}_proj").parameters())
        if n != "v":
            norm = attention.get_submodule(f"{n}_norm").weight
            weight, bias = weight * norm[:, None], bias * norm
        size = (weight.square().sum(-1) + bias.square()).mean(-1, keepdim=True).sqrt()
        values = torch.einsum("hdw,tw->thd", weight, x) + bias
        projected[n], sizes[n] = (y.repeat_interleave(HEADS // len(size), dim=-2) for y in (values, size))
    # Of queries and keys, once all heads have one size, silu is a feature map.
    f_q, f_k = (F.normalize(F.silu(projected[n] / sizes[n]), dim=-1) for n in "qk")
    S, reads = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64), []
    for q, k, v in zip(f_q, f_k, projected["v"], strict=True):
        S = KEPT * S
        S = S + BETA * k[:, :, None] * (v - (k[:, :, None] * S).sum(1))[:, None]
        reads.append((q[:, :, None] * S).sum(1))
    y = torch.stack(reads)
    read = y / y.square().mean(-1, keepdim=True).sqrt() * sizes["v"] * READ
    assert contract.error(mixer(x[:, None])[0][:, 0], attention.out_proj(read.flatten(1))) < 1e-2


@torch.no_grad()
def test_mamba_reads_averages_of_the_sources_values(attention, linear):
    x = torch.randn(1, WIDTH, dtype=torch.float64)
    v = attention.v_proj(x).unflatten(-1, (-1, DIM)).repeat_interleave(2, dim=1)
    expected = attention.out_proj(AVERAGED * v.flatten(1))  # of a text of one value
    given = swapped(attention, "mamba")(x.expand(300, 1, WIDTH))[0]
    assert contract.error(given[-1], expected) < 1e-2


@torch.no_grad()
def test_sizes_are_those_after_the_norms_factors(attention):
    """Large factors change nothing of queries and keys, whose sizes are made 1, and values keep theirs."""
    x, gain = torch.randn(9, 1, WIDTH, dtype=torch.float64), torch.linspace(0.2, 5, WIDTH, dtype=torch.float64)
    for name in RECURRENT:
        outs = []
        for factor in (1.0, 30.0):
            source = SoftmaxAttention(WIDTH, HEADS, **SHAPE).double()
            source.load_state_dict(attention.state_dict())
            for projection in (source.q_proj, source.k_proj):
                projection.weight /= factor
            source.v_proj.weight /= factor
            outs.append(swapped(source, name, gain=gain * factor)(x * gain * factor)[0])
        assert torch.allclose(*outs, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in RECURRENT), ("gated-delta", {"gated_delta_gate_rank": 5})]
)
def test_without_biases_nothing_is_of_the_source_and_gates_stay_large(attention, name, options):
    mixer, drawn = swapped(attention, name, bias=False, **options), build(name, bias=False, **options)
    names = {parameter for parameter, _ in mixer.named_parameters()}
    assert not any(n.endswith("proj.bias") for n in names - {"dt_proj.bias"})
    if name in ("gated-delta", "delta-product"):
        gates = [m.g_b_proj.weight @ m.g_a_proj.weight if options else m.g_proj.weight for m in (mixer, drawn)]
        assert torch.allclose(gates[0].square().sum(-1).mean().sqrt(), torch.tensor(4.0).double())
        assert F.cosine_similarity(gates[0].flatten(), gates[1].double().flatten(), 0) > 0.999
    x = torch.randn(20, 2, WIDTH, dtype=torch.float64)
    target = attention(x)[0] - attention.out_proj.bias
    assert (mixer(x)[0] - target).norm() < 1.1 * target.norm()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gated-delta", {"gated_delta_key_heads": 2}, "gated_delta_key_heads is 2; .* attention it must be 4"),
        ("kimi-delta", {"kimi_delta_key_dim": 6}, "kimi_delta_key_dim is 6; in place .* must be 8 "),
        ("delta-product", {"delta_product_value_dim": 5}, "delta_product_value_dim is 5; .* must be 8 .delta-product"),
        ("mamba", {"mamba_expansion": 1}, "mamba_expansion is 1; .* must be 2 .*embeddings,output,feed-forward$"),
        ("gated-delta", {"fast_weight_heads": 2}, "fast_weight_heads is 2; in place .* must be 4"),
        ("gated-delta", {"gated_delta_kv_heads": 1}, "gated_delta_kv_heads is 1; in place .* must be 2 "),
    ],
)
def test_sizes_without_room_for_the_attention_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        check_recurrent(build(name, False, **options), HEADS, HEADS * DIM, SHAPE["kv_heads"] * DIM)


@pytest.fixture(scope="module")
def taught(fairseq, tmp_path_factory) -> tuple[Any, Path, Tensor]:
    """A Transformer that has learnt to go on in the steps in which a text begins, its folder, and such texts."""
    folder, draw = tmp_path_factory.mktemp("taught"), torch.Generator().manual_seed(0)
    model = make_source(fairseq, folder, PRE_NORM).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(80):
        texts = _texts(8, draw)
        optimizer.zero_grad()
        _loss(model, texts).backward()
        optimizer.step()
    model.eval()
    save_as_today(model, folder)
    return model, folder, _texts(8, draw)


def _texts(rows: int, draw: torch.Generator) -> Tensor:
    """Words of which each is as many after the one before, in the order of the dictionary."""
    first, steps = torch.randint(0, 40, (rows, 1), generator=draw), torch.randint(1, 4, (rows, 1), generator=draw)
    return 4 + (first + steps * torch.arange(24)) % 40


def _loss(model: Any, texts: Tensor) -> Tensor:
    logits = model(texts[:, :-1])[0]
    return F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())


@pytest.mark.parametrize("name", RECURRENT)
def test_a_transfer_starts_mixers_with_their_norm_and_the_named_groups(fairseq, taught, name):
    _, folder, _ = taught
    flags = f"{PRE_NORM} --mixers {name} --{name}-bias"
    weights = read_base_model(folder / "model.pt").weights
    layer = "decoder.layers.1.self_attn"
    own = {n.removeprefix(f"{layer}."): w for n, w in weights.items() if n.startswith(f"{layer}.")}
    whole, new = take(fairseq, folder, flags), take(fairseq, folder, f"{flags} --transfer embeddings")
    mixer = new.get_submodule(layer)
    starts = swap_recurrent(mixer, own, 2, weights[f"{layer}_layer_norm.weight"])
    assert not torch.equal(starts["conv1d.weight"][0], swap_recurrent(mixer, own, 2)["conv1d.weight"][0])
    part = take(fairseq, folder, f"{flags} --transfer attention")
    output = "o_proj" if name != "mamba" else "out_proj"
    for parameter, fresh in mixer.named_parameters():
        expected = starts.get(parameter, (fresh, ""))[0]
        assert torch.equal(whole.get_parameter(f"{layer}.{parameter}"), expected), parameter
        taken = part.get_parameter(f"{layer}.{parameter}")
        assert torch.equal(taken, fresh if parameter.startswith(output) else expected), parameter


BIASED = [f"{name} --{name}-bias" for name in RECURRENT]


@pytest.mark.parametrize("flags", [*BIASED, "gated-delta", "window-sum --window-sum-window 4"])
def test_a_converted_model_is_better_most_of_all_by_attention_transfer(fairseq, taught, flags):
    source, folder, texts = taught
    flags = f"{PRE_NORM} --mixers {flags}"
    model = take(fairseq, folder, flags)
    new = take(fairseq, folder, f"{flags} --transfer embeddings,output,feed-forward")
    at_first, random = _loss(model, texts).item(), _loss(new, texts).item()
    transfer = AttentionTransfer(read_base_model(folder / "model.pt"), model.decoder)
    optimizer, errors = torch.optim.Adam(model.decoder.layers.parameters(), lr=1e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        errors.append(transfer.errors(model, {"src_tokens": texts[:, :-1]}).mean())
        errors[-1].backward()
        optimizer.step()
    assert _loss(source, texts) < _loss(model, texts) < at_first < random
    assert errors[0] < 0.95 and errors[-1] < 0.85 * errors[0]
