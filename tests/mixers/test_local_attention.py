"""Local attention is softmax attention to a window, whatever blocks it is computed in."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fairseq_fastweights.mixers.local_attention import SMALLEST_BLOCK, LocalAttention
from tests.mixers import contract

EMBED, HEADS = 12, 2

# One block and several; windows of one, within a block, larger than the text, of several blocks and of larger blocks.
SIZES = {1: [1], 7: [1, 3, 7], 9: [40], 33: [1, 2], 64: [32], 65: [33], 100: [34], 121: [70], 200: [138]}


def build(window: int) -> LocalAttention:
    torch.manual_seed(0)
    return contract.spread(LocalAttention(EMBED, HEADS, window=window), 0.5, keep=0)


def naive(mixer: LocalAttention, x: Tensor) -> Tensor:
    q, k, v = (each(x).unflatten(-1, (HEADS, -1)) for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    rows = []
    for t in range(len(x)):
        seen = slice(max(0, t - mixer.window + 1), t + 1)
        scores = (k[seen] * q[t]).sum(-1, keepdim=True) / math.sqrt(mixer.head_dim)
        rows.append(mixer.out_proj((scores.softmax(0) * v[seen]).sum(0).flatten()))
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize(("time", "window"), [(time, window) for time, windows in SIZES.items() for window in windows])
def test_it_is_its_definition(time, window):
    contract.check_definition(build(window), naive, contract.draw(time, EMBED), None)


@pytest.mark.parametrize(("time", "window"), [(13, 4), (70, 20), (110, 70)])
def test_blocks_in_parts_and_with_padding_are_the_same(time, window):
    mixer, x, paddings = build(window), contract.draw(time, EMBED), contract.paddings(time)
    contract.check_definition(mixer, naive, x, paddings["whole"])
    for padding in ("none", "whole"):
        contract.check_parts(mixer, x, paddings[padding])


def test_work_grows_linearly():
    """By the sizes of what is multiplied: times are no claim that a test can hold."""
    counts = []
    for blocks in (10, 20):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            build(9)(contract.draw(blocks * SMALLEST_BLOCK, EMBED))
        counts.append(counter.get_total_flops())
    assert counts[1] == 2 * counts[0]
