"""Softmax attention, plain and with GPT-NeoX's rotary positions, is its definition: at once, in parts, padded."""

from __future__ import annotations

import math

import pytest
import torch
from fairseq.modules import MultiheadAttention

from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from tests.mixers.contract import error

TIME, BATCH, EMBED, HEADS = 11, 3, 24, 2  # heads of 12 dimensions

# Rounding of float32 over a softmax and two products, as the norm of the difference over the norm.
FLOAT32 = 1e-5


def build(rotary_dim: int = 4, **options) -> SoftmaxAttention:
    torch.manual_seed(0)
    module = SoftmaxAttention(EMBED, HEADS, rotary_dim=rotary_dim, **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def draw(time: int = TIME, seed: int = 1) -> torch.Tensor:
    return torch.randn(time, BATCH, EMBED, generator=torch.Generator().manual_seed(seed))


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


def padded(*rows: slice) -> torch.Tensor:
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    for row, places in enumerate(rows):
        padding[row, places] = True
    return padding


@pytest.mark.parametrize(
    "padding", [None, padded(slice(4)), padded(slice(0), slice(8, None)), padded(slice(3), slice(8, None), slice(1))]
)
@pytest.mark.parametrize(("rotary_dim", "base"), [(0, 10000), (2, 10000), (4, 10000), (12, 10000), (6, 50.5)])
def test_it_is_its_definition_whole_and_in_parts(rotary_dim, base, padding):
    module, x = build(rotary_dim, rotary_base=base), draw()
    real = ~padded().t() if padding is None else ~padding.t()
    expected = by_hand(module, x, padding)[real]
    out, _ = module(x, None, padding)
    assert out.isfinite().all() and error(out[real], expected) <= FLOAT32
    # What stands where padding is changes nothing elsewhere.
    assert torch.equal(module(torch.where(real[..., None], x, draw(seed=7)), None, padding)[0][real], out[real])
    for lengths in ([1] * TIME, [4, 1, 1, 5]):
        state, outs = None, []
        for piece, mask in zip(x.split(lengths), (~real.t()).split(lengths, dim=1), strict=True):
            # As fairseq's decoder does: no mask where nothing in the piece is padding.
            out, state = module(piece, state, mask if mask.any() else None)
            outs.append(out)
        assert error(torch.cat(outs)[real], expected) <= FLOAT32


def test_padding_is_reordered_with_the_rows():
    module, x, order = build(), draw(4), torch.tensor([2, 0, 0])
    padding = padded(slice(1))[:, :4]
    _, state = module(x[:3], None, padding[:, :3])
    mixed = torch.cat([x[:3, order], x[3:]])
    out, _ = module(x[3:], module.reorder(state, order))
    assert error(out, module(mixed, None, padding[order])[0][3:]) <= FLOAT32


@torch.no_grad()
def test_it_starts_as_fairseqs_attention_and_gives_what_that_gives():
    modules = []
    for kind, options in ((SoftmaxAttention, {}), (MultiheadAttention, {"self_attention": True})):
        torch.manual_seed(3)
        modules.append(kind(EMBED, HEADS, **options).eval())
    ours, theirs = modules
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}
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
