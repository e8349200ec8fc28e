"""Rotary attention computes GPT-NeoX's equations, at once and step by step, with padding, in every precision."""

from __future__ import annotations

import math

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.mixers.softmax_attention import RotaryAttention

TIME, BATCH, EMBED, HEADS = 11, 3, 24, 2  # heads of 12 dimensions

# Rounding of float32 over a softmax and two products, as the norm of the difference over the norm.
FLOAT32 = 1e-5


def build(rotary_dim: int = 4, seed: int = 0, **options) -> RotaryAttention:
    torch.manual_seed(seed)
    module = RotaryAttention(EMBED, HEADS, rotary_dim=rotary_dim, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def draw(time: int = TIME, seed: int = 1) -> torch.Tensor:
    return torch.randn(time, BATCH, EMBED, generator=torch.Generator().manual_seed(seed))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


def by_hand(module: RotaryAttention, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
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


@pytest.mark.parametrize(("rotary_dim", "base"), [(2, 10000), (4, 10000), (12, 10000), (6, 50.5)])
def test_it_is_its_definition(rotary_dim, base):
    module = build(rotary_dim, rotary_base=base)
    out, weights = module(draw())
    assert weights is None
    assert error(out, by_hand(module, draw())) <= FLOAT32


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_is_not_attended_to(side):
    module = build()
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    if side != "right":
        padding[0, :4] = True
    if side != "left":
        padding[1, 8:] = True
    out, _ = module(draw(), key_padding_mask=padding)
    assert out.isfinite().all()
    real = ~padding.t()
    assert error(out[real], by_hand(module, draw(), padding)[real]) <= FLOAT32
    # What stands where padding is changes nothing elsewhere.
    other = torch.where(padding.t()[..., None], draw(seed=7), draw())
    assert torch.equal(module(other, key_padding_mask=padding)[0][real], out[real])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pieces", [[1] * TIME, [4, 1, 1, 5], [TIME]])
def test_in_pieces_it_is_the_same(pieces, padded):
    module = build()
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    if padded:
        padding[0, :3] = True
        padding[2, :1] = True
    full, _ = module(draw(), key_padding_mask=padding if padded else None)
    state: dict = {}
    outs, start = [], 0
    for size in pieces:
        mask = padding[:, start : start + size]
        # As fairseq's decoder does: no mask where nothing in the piece is padding.
        x = draw()[start : start + size]
        outs.append(module(x, x, x, key_padding_mask=mask if mask.any() else None, incremental_state=state)[0])
        start += size
    real = ~padding.t()
    assert error(torch.cat(outs)[real], full[real]) <= FLOAT32


def test_the_state_is_fairseqs_and_its_rows_can_be_reordered():
    module, fairseqs = build(), MultiheadAttention(EMBED, HEADS, self_attention=True)
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in fairseqs.named_parameters()}
    states: tuple[dict, dict] = ({}, {})
    for state, each in zip(states, (module, fairseqs), strict=True):
        for t in range(3):
            x = draw()[t : t + 1]
            each(x, x, x, incremental_state=state)
    (ours,), (theirs,) = (list(state.values()) for state in states)
    assert {n: x.shape for n, x in ours.items() if x is not None} == {
        n: x.shape for n, x in theirs.items() if x is not None
    }
    order = torch.tensor([2, 0, 0])
    module.reorder_incremental_state(states[0], order)
    out, _ = module(draw()[3:4], incremental_state=states[0])
    mixed = torch.cat([draw()[:3, order], draw()[3:4]])
    assert error(out, module(mixed)[0][3:]) <= FLOAT32


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
        ({"rotary_dim": 3}, "rotary_dim is 3; .* even number from 2 to the head dim, 12"),
        ({"rotary_dim": 14}, "rotary_dim is 14; "),
        ({"rotary_dim": 0}, "rotary_dim is 0; "),
        ({"rotary_dim": -2}, "rotary_dim is -2; "),
        ({"rotary_dim": 4, "rotary_base": 0}, "rotary_base is 0; it must be positive"),
        ({"rotary_dim": 4, "rotary_base": float("nan")}, "rotary_base is nan"),
        ({"rotary_dim": 4, "num_heads": 5}, "num_heads is 5; .*divisor of embed_dim, 24"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RotaryAttention(EMBED, **{"num_heads": HEADS, **options})


def test_it_is_self_attention():
    x = draw()
    for key, value in ((x.clone(), x), (x, x.clone()), (None, x.clone()), (x.clone(), None)):
        with pytest.raises(ValueError, match="must be None or query itself"):
            build()(x, key, value)
