"""A window of softmax attention and a memory of what is older, in one sum: held against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fairseq_fastweights.mixers.local_attention import SMALLEST_BLOCK
from fairseq_fastweights.mixers.rotary_embedding import rotate, turns
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.mixers.window_sum import WindowSum
from tests.mixers import contract

EMBED, HEADS = 12, 2
ATTENTION = frozenset({"attention"})
GROUPED = {"kv_heads": 1, "head_dim": 4, "projection_bias": "none", "query_key_norm_eps": 0.1}

# Shorter than the window, one block and several; windows of one, within a block, of several and of larger blocks.
CASES = [
    (5, {"window": 9}),
    (7, {"window": 1, "feature_map": "elu", "normalization": ATTENTION}),
    (34, {"window": 3, "feature_map": "dpfp"}),
    (12, {"window": 3, "feature_map": "favor", "favor_features": 4, "normalization": ATTENTION}),
    (33, {"window": 4, **GROUPED}),
    (40, {"window": 7, "normalization": ATTENTION, "feature_dim": 5}),
    (100, {"window": 34}),
    (200, {"window": 138}),
]


def build(**options) -> WindowSum:
    torch.manual_seed(0)
    return contract.spread(WindowSum(EMBED, HEADS, **options), 0.5, keep=0)


def naive(mixer: WindowSum, x: Tensor) -> Tensor:
    """A row of a text, (time, embed_dim), one sum of weights after the other."""
    time, dim = len(x), mixer.head_dim
    q, k, v = (each(x).unflatten(-1, (-1, dim)) for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    q, k = mixer.q_norm(q), mixer.k_norm(k)
    if mixer.rotary.dim:
        turned = turns(torch.arange(time)[:, None].float(), mixer.rotary.dim, mixer.rotary.base, x.dtype)
        q, k = rotate(q, *turned), rotate(k, *turned)
    k, v = (y.repeat_interleave(HEADS // y.shape[1], dim=1) for y in (k, v))
    f_q, f_k = (y[0] for y in mixer.feature_map(q[None], k[None]))
    if "sum" in mixer.normalization:
        f_q, f_k = (f / (f.sum(-1, keepdim=True) + mixer.feature_map.sum_eps) for f in (f_q, f_k))
    rows = []
    for t in range(time):
        old, seen = slice(0, max(0, t - mixer.window + 1)), slice(max(0, t - mixer.window + 1), t + 1)
        scores = (k[seen] * q[t]).sum(-1) / math.sqrt(dim)
        near = mixer.log_factor.exp() * (scores - scores.amax(0)).exp()
        weights = torch.cat([(f_k[old] * f_q[t]).sum(-1), near])[..., None]
        rows.append(mixer.out_proj(((weights * v[: t + 1]).sum(0) / weights.sum(0)).flatten()))
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize(("time", "options"), CASES)
def test_it_is_its_definition(time, options):
    contract.check_definition(build(**options), naive, contract.draw(time, EMBED), None)


@pytest.mark.parametrize(("time", "options"), [(13, {"window": 4, **GROUPED}), (110, {"window": 70})])
def test_blocks_in_parts_and_with_padding_are_the_same(time, options):
    mixer, x, paddings = build(**options), contract.draw(time, EMBED), contract.paddings(time)
    contract.check_definition(mixer, naive, x, paddings["whole"])
    for padding in ("none", "whole"):
        contract.check_parts(mixer, x, paddings[padding])


@torch.no_grad()
def test_positions_rotate_and_within_the_window_it_is_softmax_attention():
    rotary = {"rotary_dim": 2, "rotary_base": 50.0, **GROUPED}
    mixer, x = build(window=4, **rotary), contract.draw(15, EMBED)
    angles = 1e-6  # in float32
    expected = torch.stack([naive(mixer, row) for row in x.unbind(1)], dim=1)
    assert contract.error(mixer(x)[0], expected) <= angles
    parts, _ = contract.in_parts(mixer, x, [1, 5, 3, 6], None, overwrite=True)
    assert contract.error(parts, expected) <= angles
    wide, attention = build(window=15, **rotary), SoftmaxAttention(EMBED, HEADS, **rotary).double()
    attention.load_state_dict({n: p for n, p in wide.state_dict().items() if n in attention.state_dict()})
    for gradients in (False, True):  # with and without the short way
        with torch.set_grad_enabled(gradients):
            assert contract.error(wide(x)[0], attention(x)[0]) <= contract.FLOAT64


def test_large_scores_do_not_overflow_and_nothing_is_divided_by_zero():
    mixer, x = build(window=3).float(), contract.draw(12, EMBED).float()
    for scale in (300.0, 0.0):
        out = mixer(x * scale)[0]
        assert out.isfinite().all()
        grads = torch.autograd.grad(out.square().sum(), list(mixer.parameters()))
        assert all(grad.isfinite().all() for grad in grads)


def test_work_grows_linearly():
    """By the sizes of what is multiplied: times are no claim that a test can hold."""
    counts = []
    for blocks in (10, 20):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            build(window=9)(contract.draw(blocks * SMALLEST_BLOCK, EMBED))
        counts.append(counter.get_total_flops())
    assert counts[0] < counts[1] < 2.1 * counts[0]  # more than twice as many positions are beyond the first window


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": frozenset()}, "normalization is 'none'; with window-sum it must be auto, attention, or sum"),
        ({"normalization": frozenset({"sum"})}, "normalization is 'sum'; with window-sum it must be auto"),
        ({"feature_map": "tanh"}, "feature_map is 'tanh'; with window-sum it must be a map without negative outputs"),
        ({"feature_map": "elu", "feature_dim": 3}, "feature_dim is 3; with window-sum .* must be the head dim, 6"),
        ({"rotary_dim": 3}, "rotary_dim is 3; it must be an even number"),
        ({"backend": "cuda"}, "backend is 'cuda'; it must be one of"),
    ],
)
def test_what_it_cannot_be_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        WindowSum(EMBED, HEADS, **options)
