"""What retention has besides the equations that all rules are held to: positions, the range of its sums, its sizes."""

from __future__ import annotations

import copy

import pytest
import torch

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.models.segment_state import SegmentState


def build(embed_dim: int = 16, num_heads: int = 2, **options) -> FastWeightAttention:
    torch.manual_seed(0)
    return FastWeightAttention(embed_dim, num_heads, update_rule="retention", **options).eval()


def draw(time: int, batch: int = 2, width: int = 16) -> torch.Tensor:
    return torch.randn(time, batch, width, generator=torch.Generator().manual_seed(1))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("position", [1, 1000, 100_000_000])
def test_only_differences_of_positions_matter_however_long_the_text_is(position):
    """Angles in float32 would be off by a radian after ten million positions, a tenth of WikiText-103."""
    module, x = build(), draw(20)
    incremental: dict = {}
    module(x[:0], incremental_state=incremental)
    (buffer,) = incremental.values()
    buffer["position"] += position
    out, far = module(x)[0], module(x, incremental_state=incremental)[0]
    # Cosines and sines are rounded once, wherever they stand.
    assert error(far, out) <= 1e-6
    assert position == 1 or not torch.equal(far, out)


def test_rows_that_start_anew_start_at_position_nothing():
    module, x = build(), draw(9)
    incremental: dict = {}
    module(x[:4], incremental_state=incremental)
    (name,) = incremental
    assert incremental[name]["position"].tolist() == [4, 4]
    segment = SegmentState(incremental, torch.tensor([True, False]))
    assert segment[name]["position"].tolist() == [4, 0]
    out, _ = module(x[4:], incremental_state=segment)
    assert error(out[:, 0], module(x)[0][4:, 0]) <= 1e-5
    assert error(out[:, 1], module(x[4:])[0][:, 1]) <= 1e-5
    assert segment.detached()[name]["position"].tolist() == [9, 5]


def test_padding_takes_no_position():
    module, x = build(), draw(6)
    padding = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    incremental: dict = {}
    module(x, key_padding_mask=padding, incremental_state=incremental)
    (buffer,) = incremental.values()
    assert buffer["position"].tolist() == [3, 6]


def test_the_order_of_steps_matters():
    """Without positions the last read-out of two swapped steps would differ by their decays alone, 3 %."""
    module, x = build(), draw(12)
    swapped = x[[1, 0, *range(2, 12)]]
    assert error(module(swapped)[0][-1], module(x)[0][-1]) > 0.1


def test_sums_beyond_the_range_of_float16_are_read():
    """Products of q, k and v of some 10,000, summed over hundreds of steps, which the norm brings back to 1."""
    module = build(64, 4)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(module, name).bias.fill_(50.0)
    low = copy.deepcopy(module).half()
    x = draw(2048, 1, 64).half()
    plain = copy.deepcopy(low)
    plain.needs_float32_range = False
    assert not plain(x)[0].isfinite().all(), "the test does not test what it says"
    out, _ = low(x)
    exact, _ = copy.deepcopy(low).float()(x.float())
    # 1e-3 are two roundings of float16.
    assert out.isfinite().all() and error(out, exact) <= 3e-3
    out.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in low.parameters())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_half_types_at_the_size_of_retnet(dtype, bound):
    """Heads of 256 and 2048 steps, as Choi 2024 has them: 0.6 % and 0.06 %, some five roundings."""
    module = build(512, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.04)
        low = copy.deepcopy(module).to(dtype)
        x = draw(2048, 1, 512).to(dtype)
        assert error(low(x)[0], copy.deepcopy(low).float()(x.float())[0]) <= bound


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 16}, "gives keys 1 dimensions; with the retention rule their number must be even"),
        ({"feature_dim": 5}, "gives keys 5 dimensions; with the retention rule"),
        (
            {"feature_map": "elu", "normalization": frozenset({"sum"})},
            "normalization is 'sum'; with the retention rule",
        ),
    ],
    ids=["one dimension", "five dimensions", "normalised"],
)
def test_what_retention_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
