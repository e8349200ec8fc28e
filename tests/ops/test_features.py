"""Feature maps with their normalisation as one operation: the kernel against the definition, outputs and gradients."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import forward_ad

from fairseq_fastweights.ops import backends
from fairseq_fastweights.ops.checks import BackendUnavailable
from fairseq_fastweights.ops.elementwise import MAPS, NORMALIZATIONS, map_features, random_features
from fairseq_fastweights.ops.kernels import DPFP
from tests.ops.rules import DEVICE

HOW = [(name, nu) for name in MAPS for nu in ((1, 3) if name == "dpfp" else (1,))]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
"""Of norms. Outputs are rounded once, to float32; gradients of 16 bits to these."""


def vectors(dim, dtype, *, heads=3, positive=False):
    """(batch, time, heads, dim), laid out as a projection has them; the last vector is 0."""
    drawn = 2 * torch.randn(5, 2, heads * dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    drawn = drawn.abs() + 0.1 if positive else drawn
    drawn[-1] = 0
    return drawn.to(DEVICE, dtype).unflatten(-1, (heads, dim)).transpose(0, 1)


def both_ways(x, d_out, **how):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = map_features(x, **how)
    (gradient,) = torch.autograd.grad(out, x, d_out(out))
    return out.detach(), gradient


def cotangent(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out)


def norm_of_difference(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("name", "nu"), HOW)
def test_kernel_is_the_definition(name, nu, normalization, dtype):
    # From less than a vector register to several; sums of mixed signs are near 0 and nothing can be said of them.
    for dim, eps, scale in product((4, 5, 16, 37), (0.0, 1e-3), (1.0, 0.3)):
        x = vectors(dim, dtype, positive=name == "identity" and normalization == "sum")
        # A length of 0 has no inverse, whatever computes it.
        eps = max(eps, 1e-6) if normalization == "length" else eps
        how = {"feature_map": name, "nu": min(nu, 2 * dim - 1), "normalization": normalization, "eps": eps}
        found = both_ways(x, cotangent, scale=scale, backend="native", **how)
        wanted = both_ways(x.double(), cotangent, scale=scale, backend="reference", **how)
        assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert found[1].dtype == dtype and found[1].stride() == x.stride()
        assert norm_of_difference(found[0], wanted[0]) < min(TOLERANCE[dtype], 1e-6)
        # The terms that a division adds to a gradient nearly cancel against the others.
        assert norm_of_difference(found[1], wanted[1]) < 20 * TOLERANCE[dtype]


def random_both_ways(projected, source, **how):
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (projected, source)]
    out = random_features(*leaves, **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent(out))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("log_epsilon", [-math.inf, math.log(1e-2), 3.0])
@pytest.mark.parametrize("stabilized", [False, True])
def test_random_features_are_their_definition(stabilized, log_epsilon, dtype):
    for normalization, (features, dim) in product(NORMALIZATIONS, ((1, 3), (5, 4), (16, 16), (37, 5))):
        projected, source = vectors(features, dtype), vectors(dim, dtype)
        # A sum divides out the scale of the source, but for eps.
        how = {"scale": 0.6, "log_epsilon": log_epsilon, "stabilized": stabilized, "eps": 0.1}
        how["normalization"] = normalization
        found = random_both_ways(projected, source, backend="native", **how)
        wanted = random_both_ways(projected.double(), source.double(), backend="reference", **how)
        assert norm_of_difference(found[0], wanted[0]) < min(TOLERANCE[dtype], 1e-6)
        for one, other, of in zip(found[1:], wanted[1:], (projected, source), strict=True):
            assert one.dtype == dtype and one.stride() == of.stride()
            assert norm_of_difference(one, other) < 50 * TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_random_features_of_any_size(backend):
    # Without the largest divided out they grow beyond every number, or vanish; with it they do neither.
    for size, plain in ((100.0, math.inf), (-1000.0, 0.0)):
        projected = torch.tensor([[[[size, 0.0]]]], device=DEVICE).abs() if size > 0 else torch.zeros(1, 1, 1, 2)
        source = torch.zeros(1, 1, 1, 1, device=DEVICE) if size > 0 else torch.full((1, 1, 1, 1), 50.0, device=DEVICE)
        out = random_features(projected.to(DEVICE), source, backend=backend)
        assert float(out.amax()) == plain
        out = random_features(projected.to(DEVICE), source, stabilized=True, normalization="sum", backend=backend)
        torch.testing.assert_close(out.sum(), torch.tensor(1.0, device=DEVICE))
    projected = torch.tensor([[[[math.nan]], [[1.0]]]], device=DEVICE)
    for stabilized in (False, True):
        out = random_features(projected, torch.zeros_like(projected), stabilized=stabilized, backend=backend)
        assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


def test_operators_of_random_features():
    x, source = (vectors(dim, torch.float64).detach()[:, :2] / 3 for dim in (3, 4))
    how = (0.5, -2.0, True, 1, 1e-5)
    operators = [getattr(torch.ops.fairseq_fastweights, f"random_features{end}") for end in ("", "_backward")]
    torch.library.opcheck(operators[0], (x.requires_grad_(), source.requires_grad_(), *how, torch.bfloat16))
    out = operators[0](x, source, *how, torch.float64).detach()
    torch.library.opcheck(operators[1], (out, x.detach(), source.detach(), *how))
    with pytest.raises(RuntimeError, match=r"source has shape \[2, 2, 3, 4\]; it must be \[2, 1, 3, 4\]"):
        operators[0](x[:, :1], source, *how, torch.float64)
    run = partial(random_features, scale=0.5, log_epsilon=-2.0, normalization="length", backend="native")
    assert torch.autograd.gradcheck(run, (x, source)) and torch.autograd.gradgradcheck(run, (x, source))
    with pytest.raises(ValueError, match=r"projected has shape .*; they must be \(batch, time, heads, features\)"):
        random_features(x, source[:1])


LAYOUTS = {
    "a part of each head": lambda x: x[..., 1:4],
    "every other head": lambda x: x[:, :, ::2],
    "one vector for all steps": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "dimensions before heads": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "no steps": lambda x: x[:, :0],
    "no batch": lambda x: x[:0],
    "one dimension": lambda x: x[..., :1].abs() + 1,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x = LAYOUTS[layout](vectors(5, torch.float32, heads=4))
    for name, d_out in product(("elu", "dpfp"), (cotangent, lambda out: out.new_ones(1).expand(out.shape))):
        how = {"feature_map": name, "normalization": "sum", "eps": 1e-5}
        found, wanted = (both_ways(x, d_out, backend=backend, **how) for backend in ("native", "reference"))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, check_stride=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_of_results(dtype):
    x = vectors(6, torch.float32)
    found, wanted = (map_features(x, "elu", dtype=dtype, backend=backend) for backend in ("native", "reference"))
    assert found.dtype == wanted.dtype == dtype
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(("name", "nu"), HOW)
def test_what_is_not_finite_stays_in_its_vector(name, nu, backend):
    for bad in (math.nan, math.inf):
        x = vectors(4, torch.float32).clone()
        x[0, 2, 1, 3] = bad
        out, gradient = both_ways(x, cotangent, feature_map=name, nu=nu, normalization="sum", eps=1e-5, backend=backend)
        for result in (out, gradient):
            finite = result.isfinite().all(-1)
            assert not finite[0, 2, 1] and int((~finite).sum()) == 1


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_sum_that_has_underflowed_divides_nothing(backend):
    x = torch.full((1, 1, 1, 3), -150.0, device=DEVICE)
    out, gradient = both_ways(x, torch.ones_like, feature_map="elu", normalization="sum", backend=backend)
    assert not out.any() and not gradient.any()
    # The smallest that does not: exp(-87) is a normal number.
    out, _ = both_ways(x + 63, torch.ones_like, feature_map="elu", normalization="sum", backend=backend)
    torch.testing.assert_close(out, torch.full_like(out, 1 / 3))


def test_operators():
    x = vectors(3, torch.float32).requires_grad_()
    for number, (name, nu) in enumerate((name, nu) for name, nu in HOW if nu == 1):
        assert (name == "dpfp") == (number == DPFP)
        how = (number, nu, 1, 1e-5, 0.5)
        forward, backward = (getattr(torch.ops.fairseq_fastweights, f"map_features{end}") for end in ("", "_backward"))
        torch.library.opcheck(forward, (x, *how, torch.bfloat16))
        out = forward(x, *how, torch.float32).detach()
        torch.library.opcheck(backward, (out, x.detach(), *how))


WRONG_CALLS = [
    ((2, 1, 3), (0, 1, 0, 0.0, 1.0), r"x has shape \[2, 1, 3\]"),
    ((2, 1, 1, 3), (4, 1, 0, 0.0, 1.0), "map is 4; it must be from 0 to 3"),
    ((2, 1, 1, 3), (-1, 1, 0, 0.0, 1.0), "map is -1"),
    ((2, 1, 1, 3), (0, 1, 3, 0.0, 1.0), "normalization is 3; it must be from 0 to 2"),
    ((2, 1, 1, 3), (3, 6, 0, 0.0, 1.0), "nu is 6; it must be from 1 to 5"),
    ((2, 1, 1, 3), (3, 0, 0, 0.0, 1.0), "nu is 0"),
]


@pytest.mark.parametrize(("shape", "how", "message"), WRONG_CALLS)
def test_operators_refuse_what_they_would_read_beyond(shape, how, message):
    backends.why_not(DEVICE.type, torch.float32)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fairseq_fastweights.map_features(torch.zeros(shape, device=DEVICE), *how, torch.float32)


def test_gradient_of_another_shape_is_refused():
    x = torch.zeros(2, 1, 1, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"d_out has shape \[2, 1, 1, 3\]; it must be \[2, 1, 1, 6\]"):
        torch.ops.fairseq_fastweights.map_features_backward(x, x, DPFP, 1, 0, 0.0, 1.0)


REFUSED = [
    ({"feature_map": "softmax"}, "feature_map is 'softmax'; it must be one of identity, elu, relu, dpfp"),
    ({"normalization": "l2"}, "normalization is 'l2'; it must be one of none, sum, length"),
    ({"feature_map": "dpfp", "nu": 8}, "nu is 8; it must be from 1 to 7 for vectors of 4"),
    ({"backend": "fast"}, "backend is 'fast'"),
    ({"backend": ["fast"]}, r"backend is \['fast'\]"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED)
def test_refusals(how, message):
    with pytest.raises(ValueError, match=message):
        map_features(torch.zeros(1, 1, 1, 4), **how)
    with pytest.raises(ValueError, match=r"x has shape \(4,\)"):
        map_features(torch.zeros(4))


def test_no_kernel_for_a_device():
    x = torch.zeros(1, 1, 1, 4, device="meta")
    assert map_features(x, "dpfp").shape == (1, 1, 1, 8)
    with pytest.raises(BackendUnavailable, match="devices of type meta"):
        map_features(x, backend="native")


def test_compiled_and_derivatives():
    x = vectors(4, torch.float32).requires_grad_()
    run = partial(map_features, feature_map="dpfp", nu=2, normalization="sum", eps=1e-5)
    compiled = torch.compile(lambda x: run(x).square().sum(), backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(x), x)
    (wanted,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(found, wanted.detach())
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(wanted.sum(), x)
    # "auto" takes the implementation that has forward-mode derivatives.
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x.detach(), torch.ones_like(x)))).tangent
    assert tangent is not None and bool(tangent.isfinite().all())
