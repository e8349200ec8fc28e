"""Retention's own parts, besides the equations that all rules are held to: positions, the range of its sums, sizes."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights.mixers.retention import Retention, log_decays, retention
from fairseq_fastweights.ops import kernels
from tests.mixers import contract
from tests.mixers.contract import error


def build(embed_dim: int = 16, num_heads: int = 2) -> Retention:
    torch.manual_seed(0)
    return Retention(embed_dim, num_heads).eval()


def test_retention_is_its_equation_exactly_as_far_as_types_reach():
    """Parallel form: y_t = sum over s <= t of gamma^(t - s) <q_t, k_s> v_s; gamma = 1 - 2^(-5 - h)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 150, 16, 4, dtype=torch.float64).unbind()
    decays = 1 - 2.0 ** -(5 + torch.arange(16, dtype=torch.float64))
    distance = (torch.arange(150)[:, None] - torch.arange(150)).double()
    mask = (decays[:, None, None] ** distance).masked_fill(distance < 0, 0)
    expected = torch.einsum("bthk,bshk,hts,bshv->bthv", q, k, mask, v)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        logs = log_decays(16, q.device, dtype)
        # To the last digit, where 1 - gamma has lost most of them: 2^-20 in float32.
        assert torch.allclose(logs.double(), decays.log(), rtol=torch.finfo(dtype).eps, atol=0)
        for backend in ("reference", "chunkwise", "native"):
            y, _ = retention(*(x.to(dtype) for x in (q, k, v)), logs.expand(2, 150, 16), backend=backend)
            assert (y.double() - expected).norm() <= bound * expected.norm(), (dtype, backend)


def test_retention_takes_the_kernels_of_one_gate_per_head(monkeypatch):
    taken, forward = [], kernels.rule_forward
    monkeypatch.setattr(kernels, "rule_forward", lambda *args: taken.append(args[3:10]) or forward(*args))
    q, k, v = torch.randn(3, 2, 5, 4, 6, requires_grad=True).unbind()
    retention(q, k, v, log_decays(4, q.device, q.dtype).expand(2, 5, 4), backend="native")
    ((_, _, _, log_gate, complement, *decays),) = taken
    assert log_gate.shape == (2, 5, 4) and not complement and decays == [None, None]


@pytest.mark.parametrize("position", [1, 1000, 100_000_000])
def test_only_differences_of_positions_matter_however_long_the_text_is(position):
    """Angles in float32 would be off by a radian after ten million positions, a tenth of WikiText-103."""
    module, x = build(), contract.draw(20, 16).float()
    _, state = module(x[:0])
    out, far = module(x)[0], module(x, {**state, "position": state["position"] + position})[0]
    assert error(far, out) <= 1e-6  # cosines and sines are rounded once, wherever they stand
    assert position == 1 or not torch.equal(far, out)
