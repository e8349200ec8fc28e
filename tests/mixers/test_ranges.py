"""Mixers compute numbers that would leave the range of their dtype, or of any, if they were computed as written."""

from __future__ import annotations

import copy

import pytest
import torch

from fairseq_fastweights.mixers.bounded_memory_attention import ABCMLP
from fairseq_fastweights.mixers.gated_linear_attention import GatedLinearAttention
from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.window_sum import WindowSum
from tests.mixers import contract
from tests.mixers.test_equations import EMBED, HEADS, build


@pytest.mark.parametrize("dtype", [torch.float32, *contract.HALF])
def test_the_control_of_abc_neither_overflows_nor_vanishes(dtype):
    """Logits from -5,000 to 5,000: exp() of them and sums of that have no place even in float64."""
    mixer, time = build(ABCMLP, {"slots": 3}), 300
    x = contract.draw(time, EMBED)
    x[:, :, :3] += torch.linspace(-5000, 5000, time)[:, None, None] * torch.tensor([1.0, -1.0, 0.0])
    with torch.no_grad():  # these three numbers of the input are the slots' logits, and nothing else
        mixer.control_proj.weight.copy_(torch.eye(3, EMBED).repeat(HEADS, 1))
        for module in (mixer.q_proj, mixer.k_proj, mixer.v_proj):
            module.weight[:, :3] = 0
    mixer, x = mixer.to(dtype), x.to(dtype)
    phi, _, log_kept, after = mixer._controls(x, None, torch.ones(contract.BATCH, time, dtype=torch.bool))
    exact = x[:, :, :3].double()
    log_sum = exact.logcumsumexp(dim=0).transpose(0, 1)
    assert contract.error(phi[:, :, 0].double(), (exact.transpose(0, 1) - log_sum).exp()) <= 1e-6
    assert contract.error(log_kept[:, 1:, 0].double(), log_sum[:, :-1] - log_sum[:, 1:]) <= 1e-6
    assert contract.error(after["log_sum"][:, 1], log_sum[:, -1]) <= 1e-12
    out, _ = mixer(x)
    assert contract.error(out, contract.in_parts(mixer, x, [1, 100, time - 101], None)[0]) <= 2e-2
    loss = 1e-3 * out.float().square().mean()  # or the gradients of weights for inputs of 5,000 leave float16
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, list(mixer.parameters())))


def test_scores_of_window_sum_neither_overflow_nor_sum_to_zero():
    mixer, x = build(WindowSum, {"window": 3}).float(), contract.draw(12, EMBED).float()
    for scale in (300.0, 0.0):
        out = mixer(x * scale)[0]
        assert out.isfinite().all()
        grads = torch.autograd.grad(out.square().sum(), list(mixer.parameters()))
        assert all(grad.isfinite().all() for grad in grads)


def test_retention_reads_sums_beyond_the_range_of_float16():
    """Products of q, k and v of some 10,000, summed over hundreds of steps, which the norm brings back to 1."""
    torch.manual_seed(0)
    module = Retention(64, 4).eval()
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(module, name).bias.fill_(50.0)
    low = copy.deepcopy(module).half()
    x = contract.draw(2048, 64, batch=1).half()
    plain = copy.deepcopy(low)
    plain.needs_float32_range = False
    assert not plain(x)[0].isfinite().all(), "the test does not test what it says"
    out, _ = low(x)
    exact, _ = copy.deepcopy(low).float()(x.float())
    assert out.isfinite().all() and contract.error(out, exact) <= 3e-3  # 1e-3 are two roundings of float16
    out.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in low.parameters())


def test_gla_reads_sums_beyond_the_range_of_float16():
    torch.manual_seed(0)
    mixer = GatedLinearAttention(64, 2).eval()
    with torch.no_grad():
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj):
            projection.weight.mul_(100)
    x = contract.draw(64, 64, batch=1).half()
    out, expected = copy.deepcopy(mixer).half()(x)[0], mixer(x.float())[0]
    assert mixer(x.float())[1]["state"].abs().max() > torch.finfo(torch.float16).max / 10
    assert contract.error(out, expected) <= contract.HALF[torch.float16]
