"""The short convolution with its SiLU: torch's convolution, and the kernel against the definition."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from fairseq_fastweights.mixers.short_convolution import short_convolution
from tests.ops.agreement import relative_error
from tests.ops.rules import DEVICE

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
"""Of norms, as of gates."""


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def test_it_is_torch_s_convolution():
    x, weight, bias = drawn(9, 2, 5), drawn(5, 4, seed=1), drawn(5, seed=2)
    wanted = F.silu(F.conv1d(x.permute(1, 2, 0), weight[:, None], bias, padding=3, groups=5)[..., :9]).permute(2, 0, 1)
    for backend in ("native", "reference"):
        y, last = short_convolution(x, weight, bias, None, None, backend=backend)
        torch.testing.assert_close(y, wanted)
        assert torch.equal(last, x[-3:].transpose(0, 1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_kernel_is_the_definition(padded, documents, dtype):
    # One step; fewer than the convolution sees; more than are read at once; more channels than a task has; none.
    sizes = ((1, 5, 1), (2, 5, 6), (40, 37, 3), (17, 130, 4), (0, 4, 4))
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    for (time, channels, width), given in product(sizes, (True, False)):
        lengths = torch.tensor([time, time // 2], device=DEVICE) if padded else None
        starts = torch.zeros(2, time, dtype=torch.bool, device=DEVICE)
        if time:
            starts[0, time // 3], starts[0, -1], starts[1, 0] = True, not padded, True
        # A part of a projection.
        inputs = [drawn(time, 2, channels + 2, dtype=dtype)[..., 1:-1], drawn(channels, width, dtype=dtype, seed=1)]
        if given:
            inputs += [drawn(channels, dtype=dtype, seed=2), drawn(2, width - 1, channels, dtype=precise, seed=3)]
        results = []
        for backend in ("native", "reference"):
            leaves = [(x.double() if backend == "reference" else x).detach().requires_grad_() for x in inputs]
            bias_and_before = leaves[2:] or (None, None)
            how = lengths, starts if documents else None
            outs = short_convolution(*leaves[:2], *bias_and_before, *how, backend=backend)
            weights = [drawn(*x.shape, dtype=torch.float64, seed=5).to(x) for x in outs]
            results.append([*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves, weights)])
        assert results[0][1].dtype == precise and results[0][1].is_contiguous()
        for one, other in zip(*results, strict=True):
            assert relative_error(one, other) < TOLERANCE[dtype], (time, channels, width, given)
