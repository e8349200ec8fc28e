"""Softmax attention, plain and with GPT-NeoX's rotary positions, is its definition: at once, step by step, padded."""

from __future__ import annotations

import math

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention

TIME, BATCH, EMBED, HEADS = 11, 3, 24, 2  # heads of 12 dimensions

# Rounding of float32 over a softmax and two products, as the norm of the difference over the norm.
FLOAT32 = 1e-5


def build(rotary_dim: int = 4, seed: int = 0, **options) -> SoftmaxAttention:
    torch.manual_seed(seed)
    module = SoftmaxAttention(EMBED, HEADS, rotary_dim=rotary_dim, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def draw(time: int = TIME, seed: int = 1) -> torch.Tensor:
    return torch.randn(time, BATCH, EMBED, generator=torch.Generator().manual_seed(seed))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


def by_hand(module: SoftmaxAttention, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Complex numbers, one position after the other, in float64."""
    rows = torch.zeros(*x.shape, dtype=torch.float64)
    dim, half = module.head_dim, module.rotary_dim // 2

    def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
        plane = torch.complex(vector[:half], vector[half : 2 * half])
        angles = torch.tensor([position * module.rotary_base ** (-i / half) for i in range(half)]).double()
        plane = plane * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([plane.real, plane.imag, vector[2 * half :]])

    for b in range(x.shape[1]):
        q, k, v = (
            x[:, b].double() @ p.weight.double().t() + p.bias.double()
            for p in (module.q_proj, module.k_proj, module.v_proj)
        )
        for h in range(module.num_heads):
            part = slice(h * dim, (h + 1) * dim)
            for t in range(x.shape[0]):
                seen = [s for s in range(t + 1) if padding is None or s == t or not padding[b, s]]
                scores = torch.stack([turned(q[t, part], t) @ turned(k[s, part], s) for s in seen]) / math.sqrt(dim)
                rows[t, b, part] = scores.softmax(0) @ v[seen, part]
    return (rows @ module.out_proj.weight.double().t() + module.out_proj.bias.double()).float()


@pytest.mark.parametrize(("rotary_dim", "base"), [(0, 10000), (2, 10000), (4, 10000), (12, 10000), (6, 50.5)])
def test_it_is_its_definition(rotary_dim, base):
    module = build(rotary_dim, rotary_base=base)
    out, _ = module(draw())
    assert error(out, by_hand(module, draw())) <= FLOAT32


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_is_not_attended_to(side):
    module = build()
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    if side != "right":
        padding[0, :4] = True
    if side != "left":
        padding[1, 8:] = True
    out, _ = module(draw(), None, padding)
    assert out.isfinite().all()
    real = ~padding.t()
    assert error(out[real], by_hand(module, draw(), padding)[real]) <= FLOAT32
    # What stands where padding is changes nothing elsewhere.
    other = torch.where(padding.t()[..., None], draw(seed=7), draw())
    assert torch.equal(module(other, None, padding)[0][real], out[real])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pieces", [[1] * TIME, [4, 1, 1, 5], [TIME]])
def test_in_pieces_it_is_the_same(pieces, padded):
    module = build()
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    if padded:
        padding[0, :3] = True
        padding[2, :1] = True
    full, _ = module(draw(), None, padding if padded else None)
    state, outs = None, []
    for x, mask in zip(draw().split(pieces), padding.split(pieces, dim=1), strict=True):
        # As fairseq's decoder does: no mask where nothing in the piece is padding.
        out, state = module(x, state, mask if mask.any() else None)
        outs.append(out)
    real = ~padding.t()
    assert error(torch.cat(outs)[real], full[real]) <= FLOAT32


def test_its_parameters_are_fairseqs_and_the_states_rows_can_be_reordered():
    module, fairseqs = build(), MultiheadAttention(EMBED, HEADS, self_attention=True)
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in fairseqs.named_parameters()}
    padding = torch.tensor([[True, False, False], [False, False, False], [False, False, False]])
    _, state = module(draw()[:3], None, padding)
    order = torch.tensor([2, 0, 0])
    out, _ = module(draw()[3:4], module.reorder(state, order))
    mixed = torch.cat([draw()[:3, order], draw()[3:4]])
    whole = torch.cat([padding[order], torch.zeros(3, 1, dtype=torch.bool)], dim=1)
    assert error(out, module(mixed, None, whole)[0][3:]) <= FLOAT32


@torch.no_grad()
def test_it_starts_as_fairseqs_attention_and_gives_what_that_gives():
    modules = []
    for kind, options in ((SoftmaxAttention, {}), (MultiheadAttention, {"self_attention": True})):
        torch.manual_seed(3)
        modules.append(kind(EMBED, HEADS, **options).eval())
    ours, theirs = modules
    assert all(torch.equal(p, theirs.get_parameter(name)) for name, p in ours.named_parameters())
    x, mask = draw(), torch.full((TIME, TIME), -torch.inf).triu(1)
    assert error(ours(x)[0], theirs(x, x, x, attn_mask=mask)[0]) <= 1e-6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_far_into_a_text(dtype, bound):
    """Angles are float32: with positions in bfloat16 those from 300 on would be off by whole radians."""
    module = build(12)
    x = draw(600)
    expected = module(x.to(dtype).float())[0]
    assert error(module.to(dtype)(x.to(dtype))[0].float(), expected) <= bound


def test_dropout_is_of_training_only():
    module = build(dropout=0.5)
    assert torch.equal(module(draw())[0], module(draw())[0])
    module.train()
    assert not torch.equal(module(draw())[0], module(draw())[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_dim": 3}, "rotary_dim is 3; .* even number from 2 to the head dim, 12, or 0 for none"),
        ({"rotary_dim": 14}, "rotary_dim is 14; "),
        ({"rotary_dim": -2}, "rotary_dim is -2; "),
        ({"rotary_dim": 4, "rotary_base": 0}, "rotary_base is 0; it must be positive"),
        ({"rotary_dim": 4, "rotary_base": float("nan")}, "rotary_base is nan"),
        ({"rotary_dim": 4, "num_heads": 5}, "num_heads is 5; .*divisor of embed_dim, 24"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxAttention(EMBED, **{"num_heads": HEADS, **options})
