"""Gated linear attention is its paper's equations, also where its sums leave the range of float16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.mixers.gated_linear_attention import GatedLinearAttention
from tests.mixers import contract

EMBED, HEADS = 12, 3


def papers_equations(mixer: GatedLinearAttention, x: Tensor) -> Tensor:
    """A row of a text, (time, embed_dim), one step and head after the other (Yang et al. 2024, Eq. 3 and Sec. 4.4)."""
    rows, S = [], [x.new_zeros(mixer.key_dim, mixer.value_dim)] * HEADS
    for x_t in x:
        q, k, v = (p(x_t).view(HEADS, -1) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
        alpha = torch.sigmoid(mixer.f_b_proj(mixer.f_a_proj(x_t))).view(HEADS, -1) ** (1 / 16)
        S = [alpha[h][:, None] * S[h] + torch.outer(k[h], v[h]) for h in range(HEADS)]
        y = torch.stack([q[h] @ S[h] for h in range(HEADS)]) / mixer.key_dim**0.5
        y = mixer.o_norm.weight * y / (y.square().mean(-1, keepdim=True) + mixer.eps).sqrt()
        rows.append(mixer.o_proj(y.flatten() * F.silu(mixer.g_proj(x_t))))
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize("padding", ["none", "whole"])
@pytest.mark.parametrize("options", [{}, {"key_dim": 3, "value_dim": 5, "rank": 2, "eps": 0.5}], ids=str)
def test_outputs_and_gradients_are_those_of_the_equations(options, padding):
    torch.manual_seed(0)
    mixer = contract.spread(GatedLinearAttention(EMBED, HEADS, **options))
    contract.check_definition(mixer, papers_equations, contract.draw(9, EMBED), contract.paddings(9)[padding])


def test_sums_beyond_the_range_of_float16_are_read():
    torch.manual_seed(0)
    mixer = GatedLinearAttention(64, 2).eval()
    with torch.no_grad():
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj):
            projection.weight.mul_(100)
    x = contract.draw(64, 64, batch=1).half()
    out, expected = copy.deepcopy(mixer).half()(x)[0], mixer(x.float())[0]
    assert mixer(x.float())[1]["state"].abs().max() > torch.finfo(torch.float16).max / 10
    assert contract.error(out, expected) <= contract.HALF[torch.float16]
