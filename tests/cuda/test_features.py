"""Feature maps and their normalisation, emulated; `tests/ops/test_elementwise.py` runs through the binding as well."""

from __future__ import annotations

import ctypes
import math
from itertools import product

import pytest
import torch

from fairseq_fastweights.ops.elementwise import MAPS, NORMALIZATIONS, map_features, random_features
from tests.cuda.emulated import DTYPES, KINDS, StridedSequence

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float64: 1e-13}


def run(emulator, x, d_out, how):
    """The result and the gradient of x; both start as NaN."""
    _, nu, normalization, *numbers = how
    y, dx = torch.full_like(d_out, torch.nan), torch.full_like(x, torch.nan)
    given = {
        name: StridedSequence(tensor.data_ptr(), *tensor.stride()[:3], DTYPES[tensor.dtype])
        for name, tensor in {"x": x, "y": y, "dy": d_out, "dx": dx}.items()
    }
    params = KINDS["Features"](*x.shape, nu, how[0], normalization, *numbers, **given)
    for way in ("forward", "backward"):
        assert getattr(emulator.library, f"fastweights_features_{way}")(ctypes.byref(params), None) == 0
    return y, dx


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "nu"), [("identity", 1), ("elu", 1), ("relu", 1), ("dpfp", 1), ("dpfp", 3)])
def test_agrees_with_the_definition(small_emulator, name, nu, dtype):
    # Fewer dimensions than lanes, as many, and more; rows that fill a block, and that do not.
    for (dim, time), (place, normalization) in product(((4, 3), (17, 1), (32, 2), (70, 5)), enumerate(NORMALIZATIONS)):
        drawn = torch.randn(time, 2, 3 * dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
        drawn = drawn.abs() + 0.1 if name == "identity" else drawn
        x = drawn.to(dtype).unflatten(-1, (3, dim)).transpose(0, 1).requires_grad_()
        wide = x.detach().double().requires_grad_()
        how = {"nu": nu, "normalization": normalization, "eps": 1e-3, "scale": 0.5}
        wanted = map_features(wide, name, **how, backend="reference")
        d_out = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        (gradient,) = torch.autograd.grad(wanted, wide, d_out.double())
        found = run(small_emulator, x.detach(), d_out, (list(MAPS).index(name), nu, place, 1e-3, 0.5))
        for one, other in zip(found, (wanted.detach(), gradient), strict=True):
            assert float((one.double() - other).norm() / other.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("log_epsilon", "stabilized"), [(-math.inf, False), (-2.0, True), (3.0, True), (-2.0, False)])
def test_random_features_agree_with_the_definition(small_emulator, log_epsilon, stabilized, dtype):
    sizes = ((4, 3, 3), (17, 5, 1), (70, 4, 5))
    for (dim, source_dim, time), (place, normalization) in product(sizes, enumerate(NORMALIZATIONS)):
        generator = torch.Generator().manual_seed(dim)
        x, source = (
            torch.randn(time, 2, 3 * n, generator=generator, dtype=torch.float64).unflatten(-1, (3, n)).transpose(0, 1)
            for n in (dim, source_dim)
        )
        x, source = x.to(dtype), source.to(dtype)
        wide = [z.double().requires_grad_() for z in (x, source)]
        how = {"scale": 0.6, "log_epsilon": log_epsilon, "stabilized": stabilized, "eps": 0.1}
        wanted = random_features(*wide, **how, normalization=normalization, backend="reference")
        d_out = torch.randn(wanted.shape, generator=generator, dtype=torch.float64).to(dtype)
        gradients = torch.autograd.grad(wanted, wide, d_out.double())
        made = [torch.full_like(z, torch.nan) for z in (d_out, x, source)]
        params = KINDS["Features"](2, time, 3, dim, 1, 4, place, 0.1, 1.0)
        params.source_dim, params.stabilized = source_dim, stabilized
        params.source_scale, params.log_epsilon = 0.6, log_epsilon
        names = ("x", "source", "dy", "y", "dx", "d_source")
        for name, z in zip(names, (x, source, d_out, *made), strict=True):
            setattr(params, name, StridedSequence(z.data_ptr(), *z.stride()[:3], DTYPES[z.dtype]))
        for way in ("forward", "backward"):
            assert getattr(small_emulator.library, f"fastweights_features_{way}")(ctypes.byref(params), None) == 0
        for one, other in zip(made, (wanted.detach(), *gradients), strict=True):
            assert (
                float((one.double() - other).norm() / other.norm()) < 50 * TOLERANCE[dtype]
            )  # of the source much cancels


def test_threads_may_run_in_any_order(small_emulator):
    x, d_out = torch.randn(2, 3, 3, 9), torch.randn(2, 3, 3, 36)
    results = []
    for seed in (0, 1, 7):
        with small_emulator.schedule(seed):
            results.append(run(small_emulator, x, d_out, (3, 2, 1, 1e-5, 1.0)))
    for y, dx in results[1:]:
        assert torch.equal(y, results[0][0]) and torch.equal(dx, results[0][1])


def test_sizes_that_are_not_taken(small_emulator):
    params = KINDS["Features"](1, 1, 1, 4, 9, 3, 0)
    assert small_emulator.library.fastweights_features_forward(ctypes.byref(params), None) != 0
