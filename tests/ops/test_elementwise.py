"""Feature maps, gates and gated norms: the kernels against the definitions, outputs and gradients.

Their operators are held against torch's own checks here, and so is that of the short convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_fastweights.mixers.short_convolution import short_convolution
from fairseq_fastweights.ops import backends, elementwise
from fairseq_fastweights.ops.checks import BackendUnavailable
from fairseq_fastweights.ops.elementwise import (
    ACTIVATIONS,
    MAPS,
    NORMALIZATIONS,
    NORMS,
    gate,
    map_features,
    random_features,
)
from fairseq_fastweights.ops.kernels import DPFP
from tests.ops.agreement import relative_error
from tests.ops.rules import DEVICE

MAPPED = [(name, nu) for name in MAPS for nu in ((1, 3) if name == "dpfp" else (1,))]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
"""Of norms. Outputs are rounded once, to float32; gradients of 16 bits to these."""
# (time, batch, heads, dim): one number; a few channels; no power of two; more than a task; no steps.
SIZES = [(1, 1, 1, 1), (5, 3, 2, 4), (7, 2, 3, 37), (130, 2, 8, 16), (0, 2, 2, 4)]
BOTH = ("native", "reference")


def vectors(dim, dtype, *, heads=3, positive=False):
    """(batch, time, heads, dim), laid out as a projection has them; the last vector is 0."""
    drawn = 2 * torch.randn(5, 2, heads * dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    drawn = drawn.abs() + 0.1 if positive else drawn
    drawn[-1] = 0
    return drawn.to(DEVICE, dtype).unflatten(-1, (heads, dim)).transpose(0, 1)


def drawn(*shape, dtype=torch.float32, seed=0):
    x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(DEVICE, dtype)


def cotangent(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out)


def both_ways(run, inputs, d_out=cotangent):
    """The result of a function, and the gradients of all inputs."""
    leaves = {n: x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for n, x in inputs.items()}
    out = run(**leaves)
    return [out.detach(), *torch.autograd.grad(out, tuple(leaves.values()), d_out(out))]


def check(run, inputs, factor, strides=False):
    """The kernel against the definition in float64; with `strides` gradients lie as the inputs do."""
    found = both_ways(partial(run, backend="native"), inputs)
    wanted = both_ways(partial(run, backend="reference"), {name: x.double() for name, x in inputs.items()})
    dtype = next(iter(inputs.values())).dtype
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(found[0], wanted[0]) < min(TOLERANCE[dtype], 1e-6)
    for (name, x), one, other in zip(inputs.items(), found[1:], wanted[1:], strict=True):
        assert one.dtype == dtype and (not strides or one.stride() == x.stride()), name
        # Terms that a division or a norm adds to a gradient nearly cancel against the others, as do terms of sums.
        assert relative_error(one, other) < factor * TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("name", "nu"), MAPPED)
def test_maps_are_their_definition(name, nu, normalization, dtype):
    # From less than a vector register to several; sums of mixed signs are near 0 and nothing can be said of them.
    for dim, eps, scale in product((4, 5, 16, 37), (0.0, 1e-3), (1.0, 0.3)):
        x = vectors(dim, dtype, positive=name == "identity" and normalization == "sum")
        # A length of 0 has no inverse, whatever computes it.
        eps = max(eps, 1e-6) if normalization == "length" else eps
        how = {"nu": min(nu, 2 * dim - 1), "normalization": normalization, "eps": eps, "scale": scale}
        check(partial(map_features, feature_map=name, **how), {"x": x}, 20, strides=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("log_epsilon", [-math.inf, math.log(1e-2), 3.0])
@pytest.mark.parametrize("stabilized", [False, True])
def test_random_features_are_their_definition(stabilized, log_epsilon, dtype):
    for normalization, (features, dim) in product(NORMALIZATIONS, ((1, 3), (5, 4), (16, 16), (37, 5))):
        # A sum divides out the scale of the source, but for eps.
        how = {"scale": 0.6, "log_epsilon": log_epsilon, "stabilized": stabilized, "eps": 0.1}
        inputs = {"projected": vectors(features, dtype), "source": vectors(dim, dtype)}
        check(partial(random_features, normalization=normalization, **how), inputs, 50, strides=True)


@pytest.mark.parametrize("backend", BOTH)
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_are_their_definition(activation, dtype):
    for (time, batch, heads, dim), parameters, multiplies in product(SIZES, (False, True), (False, True)):
        channels = heads * dim
        # Projections are joined, and the output of a rule has another layout than the text.
        inputs = {"x": drawn(time, batch, channels + 3, dtype=dtype)[..., 1 : 1 + channels]}
        if multiplies:
            inputs["y"] = drawn(batch, time, channels, dtype=dtype, seed=1).transpose(0, 1)
        if parameters:
            inputs |= {"bias": drawn(channels, dtype=dtype, seed=2), "log_rate": drawn(heads, dtype=dtype, seed=3) / 3}
        check(partial(gate, activation=activation, scale=0.7), inputs, 20)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", NORMS[1:])
def test_gated_norms_are_their_definition(norm, dtype):
    for (time, batch, heads, dim), activation in product(SIZES[1:], ACTIVATIONS):
        inputs = {
            "x": drawn(time, batch, heads * dim, dtype=dtype),
            "y": drawn(batch, time, heads, dim, dtype=dtype, seed=1).transpose(0, 1),
        }
        inputs |= {"weight": drawn(dim, dtype=dtype, seed=2)} if activation != "sigmoid" else {}
        check(partial(gate, activation=activation, norm=norm, eps=1e-3), inputs, 20)


LAYOUTS_OF_VECTORS = {
    "a part of each head": lambda x: x[..., 1:4],
    "every other head": lambda x: x[:, :, ::2],
    "one vector for all steps": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "dimensions before heads": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "no steps": lambda x: x[:, :0],
    "no batch": lambda x: x[:0],
    "one dimension": lambda x: x[..., :1].abs() + 1,
}


@pytest.mark.parametrize("layout", LAYOUTS_OF_VECTORS)
def test_layouts_of_vectors(layout):
    x = LAYOUTS_OF_VECTORS[layout](vectors(5, torch.float32, heads=4))
    for name, d_out in product(("elu", "dpfp"), (cotangent, lambda out: out.new_ones(1).expand(out.shape))):
        how = {"feature_map": name, "normalization": "sum", "eps": 1e-5}
        found, wanted = (both_ways(partial(map_features, backend=b, **how), {"x": x}, d_out) for b in BOTH)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, check_stride=False)


LAYOUTS_OF_CHANNELS = {
    "every other channel": lambda x: x[..., ::2],
    "channels first": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "one step for all": lambda x: x[:1].expand(4, -1, -1),
    "a step": lambda x: x[0],
    "one number of each": lambda x: x[0, 0],
    "more dimensions": lambda x: x[None],
}


@pytest.mark.parametrize("layout", LAYOUTS_OF_CHANNELS)
def test_layouts_of_channels(layout):
    x, y = (LAYOUTS_OF_CHANNELS[layout](drawn(3, 2, 8, seed=seed)) for seed in range(2))
    heads = y.unflatten(-1, (2, -1))
    for how in ({}, {"y": y}, {"y": heads, "norm": "rms"}):
        out = gate(x, "silu", dtype=torch.bfloat16, backend="native", **how)
        assert out.dtype == torch.bfloat16 and out.shape == x.shape
        torch.testing.assert_close(out, gate(x, "silu", dtype=torch.bfloat16, backend="reference", **how))
    x = x.detach().requires_grad_()
    for d_out in (torch.ones(1).expand(x.shape), torch.ones(x.shape[::-1]).permute(*range(x.dim())[::-1])):
        found, wanted = (torch.autograd.grad(gate(x, "silu", y=y, backend=b), x, d_out)[0] for b in BOTH)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_of_mapped_vectors(dtype):
    x = vectors(6, torch.float32)
    found, wanted = (map_features(x, "elu", dtype=dtype, backend=backend) for backend in BOTH)
    assert found.dtype == wanted.dtype == dtype
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize(("name", "nu"), MAPPED)
def test_what_is_not_finite_stays_in_its_vector(name, nu, backend):
    run = partial(map_features, feature_map=name, nu=nu, normalization="sum", eps=1e-5, backend=backend)
    for bad in (math.nan, math.inf):
        x = vectors(4, torch.float32).clone()
        x[0, 2, 1, 3] = bad
        out, gradient = both_ways(run, {"x": x})
        for result in (out, gradient):
            finite = result.isfinite().all(-1)
            assert not finite[0, 2, 1] and int((~finite).sum()) == 1


@pytest.mark.parametrize("backend", BOTH)
def test_a_sum_that_has_underflowed_divides_nothing(backend):
    x = torch.full((1, 1, 1, 3), -150.0, device=DEVICE)
    run = partial(map_features, feature_map="elu", normalization="sum", backend=backend)
    out, gradient = both_ways(run, {"x": x}, torch.ones_like)
    assert not out.any() and not gradient.any()
    # The smallest that does not: exp(-87) is a normal number.
    out, _ = both_ways(run, {"x": x + 63}, torch.ones_like)
    torch.testing.assert_close(out, torch.full_like(out, 1 / 3))


EXTREMES = (-math.inf, -1e30, -200.0, -90.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 90.0, 1e30, math.inf, math.nan)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_logits(activation):
    x = torch.tensor(EXTREMES, device=DEVICE)
    for backend, dtype in (("native", torch.float32), ("native", torch.float64)):
        found, slope = both_ways(partial(gate, activation=activation, backend=backend), {"x": x.to(dtype)})
        wanted, steepness = both_ways(partial(gate, activation=activation, backend="reference"), {"x": x.double()})
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-37, equal_nan=True, check_dtype=False)
        finite = wanted.isfinite() & steepness.isfinite()
        close(found[finite], wanted[finite])
        close(slope[finite], steepness[finite])
        assert bool(found[-1].isnan()) and bool(slope[-1].isnan())


def test_what_is_not_finite_stays_in_its_channel_or_head():
    x, y = drawn(3, 2, 8), drawn(3, 2, 8, seed=1)
    x[1, 0, 3] = math.nan
    run = partial(gate, activation="silu", backend="native")
    found, *gradients = both_ways(run, {"x": x, "y": y})
    assert all(int(z.isnan().sum()) == 1 for z in (found, *gradients))
    found, d_x, d_y = both_ways(partial(run, norm="rms"), {"x": x, "y": y.unflatten(-1, (2, 4))})
    assert [int(z.isnan().sum()) for z in (found, d_x, d_y)] == [1, 1, 4]


class Operation(NamedTuple):
    """A call of a function and of its operator, in float64."""

    name: str
    run: Callable[..., Any]
    tensors: tuple[Tensor | None, ...]
    settings: tuple[Any, ...]  # those of the operator, behind its tensors
    dtype: torch.dtype | None  # that of the operator's result, behind the settings, if it takes one
    twice: bool = True  # whether it can be differentiated twice


def gate_of(norm: str = "none", **shapes: tuple[int, ...]) -> Operation:
    names = ("bias", "log_rate", "y", "weight")
    others = [drawn(*shapes[name], dtype=torch.float64) / 3 if name in shapes else None for name in names]

    def run(x, *others, backend="native"):
        how = {"norm": norm, "eps": 1e-3, "scale": 0.7, "backend": backend}
        return gate(x, "silu", **dict(zip(names, others, strict=True)), **how)

    tensors = drawn(2, 1, 4, dtype=torch.float64, seed=5) / 3, *others
    return Operation("gate", run, tensors, (1, NORMS.index(norm), 1e-3, 0.7), torch.float32)


def convolution() -> Operation:
    starts = torch.zeros(2, 3, dtype=torch.bool, device=DEVICE)
    starts[1, 1] = True
    rows = torch.tensor([3, 2], device=DEVICE), starts
    shapes = (3, 2, 2), (2, 3), (2,), (2, 2, 2)
    tensors = tuple(drawn(*shape, dtype=torch.float64, seed=i) / 3 for i, shape in enumerate(shapes))
    return Operation("short_convolution", lambda *x, **how: short_convolution(*x, *rows, **how), tensors, rows, None)


def map_of(number: int, name: str) -> Operation:
    how = {"feature_map": name, "normalization": "sum", "eps": 1e-5, "scale": 0.5}
    x = vectors(4, torch.float64)
    assert (name == "dpfp") == (number == DPFP)
    settings = number, 1, NORMALIZATIONS.index("sum"), 1e-5, 0.5
    return Operation("map_features", partial(map_features, **how), (x,), settings, torch.bfloat16, False)


def features_at_random() -> Operation:
    how = {"scale": 0.5, "log_epsilon": -2.0, "stabilized": False, "normalization": "length", "eps": 1e-5}
    tensors = tuple(vectors(dim, torch.float64)[:, :2] / 3 for dim in (3, 4))
    settings = 0.5, -2.0, False, NORMALIZATIONS.index("length"), 1e-5
    return Operation("random_features", partial(random_features, **how), tensors, settings, torch.bfloat16)


OPERATIONS = {
    "gate": gate_of(bias=(4,), log_rate=(2,), y=(2, 1, 4)),
    "rms norm": gate_of("rms", y=(2, 1, 2, 2), weight=(2,)),
    "layer norm": gate_of("layer", y=(2, 1, 2, 2)),
    "random features": features_at_random(),
    "short convolution": convolution(),
    **{name: map_of(number, name) for number, name in enumerate(MAPS)},
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operators_derivatives_and_compilation(name):
    operation = OPERATIONS[name]
    tensors = [x if x is None else x.detach().requires_grad_() for x in operation.tensors]
    plain, wanted = [x if x is None else x.detach() for x in tensors], [x for x in tensors if x is not None]
    backends.why_not(DEVICE.type, torch.float32)
    forward, backward = (getattr(torch.ops.fairseq_fastweights, f"{operation.name}{end}") for end in ("", "_backward"))
    of_dtype = () if operation.dtype is None else (operation.dtype,)
    torch.library.opcheck(forward, (*tensors, *operation.settings, *of_dtype))
    results = forward(*plain, *operation.settings, *((torch.float64,) if of_dtype else ()))
    results = results if isinstance(results, tuple) else (results,)
    torch.library.opcheck(backward, (*results, *plain, *operation.settings))

    torch.compiler.reset()

    def run(*given, backend="native"):
        rest = iter(given)
        found = operation.run(*(x if x is None else next(rest) for x in plain), backend=backend)
        return found if isinstance(found, tuple) else (found,)

    compiled = torch.compile(lambda *x: run(*x)[0].square().sum(), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*wanted), wanted)
    gradients = torch.autograd.grad(run(*wanted)[0].square().sum(), wanted, create_graph=True)
    torch.testing.assert_close(found, tuple(x.detach() for x in gradients))
    if operation.twice:  # second derivatives are those of the definition
        assert torch.autograd.gradcheck(run, wanted) and torch.autograd.gradgradcheck(run, wanted, atol=1e-4)
    else:
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(gradients[0].sum(), wanted)
    if len(results) == 2:  # only what the next call is given is asked for
        ours, theirs = (torch.autograd.grad(run(*wanted, backend=b)[1].sum(), wanted[0])[0] for b in BOTH)
        assert torch.equal(ours, theirs)
    # "auto" takes the implementation that has forward-mode derivatives.
    with forward_ad.dual_level():
        first, *others = (x.detach() for x in wanted)
        result, *_ = run(forward_ad.make_dual(first, torch.ones_like(first)), *others, backend="auto")
        tangent = forward_ad.unpack_dual(result).tangent
    assert tangent is not None and bool(tangent.isfinite().all())


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *(
        (partial(map_features, torch.zeros(1, 1, 1, 4)), how, message)
        for how, message in (
            ({"feature_map": "softmax"}, "feature_map is 'softmax'; it must be one of identity, elu, relu, dpfp"),
            ({"normalization": "l2"}, "normalization is 'l2'; it must be one of none, sum, length"),
            ({"feature_map": "dpfp", "nu": 8}, "nu is 8; it must be from 1 to 7 for vectors of 4"),
            ({"backend": "fast"}, "backend is 'fast'"),
            ({"backend": ["fast"]}, r"backend is \['fast'\]"),
        )
    ),
    (map_features, {"x": torch.zeros(4)}, r"x has shape \(4,\)"),
    (
        random_features,
        {"projected": torch.zeros(2, 2, 3, 3), "source": torch.zeros(1, 2, 3, 4)},
        r"projected has shape .*; they must be \(batch, time, heads, features\)",
    ),
    *(
        (partial(gate, torch.zeros(2, 4)), {"activation": "silu"} | how, message)
        for how, message in (
            ({"activation": "tanh"}, "activation is 'tanh'; it must be one of sigmoid, silu, log_sigmoid, softplus"),
            ({"norm": "group"}, "norm is 'group'; it must be one of none, rms, layer"),
            ({"bias": torch.zeros(3)}, r"bias has shape \(3,\); it must be \(4,\)"),
            (
                {"log_rate": torch.zeros(3)},
                r"log_rate has shape \(3,\); it must be \(rates,\), of which the 4",
            ),
            ({"y": torch.zeros(2, 5)}, r"y has shape \(2, 5\); it must be \(2, 4\)"),
            ({"weight": torch.zeros(4)}, "weight was given and norm is 'none'"),
            ({"norm": "rms"}, "norm is 'rms'; there must be y"),
            ({"norm": "rms", "y": torch.zeros(2, 2, 2), "bias": torch.zeros(4)}, "there must be y, and neither bias"),
            ({"norm": "rms", "y": torch.zeros(2, 4)}, r"y has shape \(2, 4\); it must be \(..., heads, dim\)"),
            ({"norm": "rms", "y": torch.zeros(3, 2, 2)}, r"y has shape \(3, 2, 2\); it must be \(2, 2, 2\)"),
            ({"norm": "rms", "y": torch.zeros(2, 2, 2), "weight": torch.zeros(4)}, r"weight has shape \(4,\)"),
            ({"backend": "fast"}, "backend is 'fast'"),
        )
    ),
]


@pytest.mark.parametrize(("call", "how", "message"), REFUSED)
def test_refusals(call, how, message):
    with pytest.raises(ValueError, match=message):
        call(**how)


_CONVOLUTION = {"x": (5, 2, 3), "weight": (3, 4), "bias": (3,), "before": (2, 3, 3), "lengths": (2,), "starts": (2, 5)}
GATED = ("bias", "log_rate", "y", "weight")
WRONG_CALLS: list[tuple[str, dict[str, Any], tuple[Any, ...], str]] = [
    # The operator, the shapes of its tensors, and its settings.
    *(
        ("map_features", {"x": shape}, (*how, 0.0, 1.0), message)
        for shape, how, message in (
            ((2, 1, 3), (0, 1, 0), r"x has shape \[2, 1, 3\]"),
            ((2, 1, 1, 3), (4, 1, 0), "map is 4; it must be from 0 to 3"),
            ((2, 1, 1, 3), (-1, 1, 0), "map is -1"),
            ((2, 1, 1, 3), (0, 1, 3), "normalization is 3; it must be from 0 to 2"),
            ((2, 1, 1, 3), (3, 6, 0), "nu is 6; it must be from 1 to 5"),
            ((2, 1, 1, 3), (3, 0, 0), "nu is 0"),
        )
    ),
    (
        "map_features_backward",
        {"d_out": (2, 1, 1, 3), "x": (2, 1, 1, 3)},
        (DPFP, 1, 0, 0.0, 1.0),
        r"d_out has shape \[2, 1, 1, 3\]; it must be \[2, 1, 1, 6\]",
    ),
    (
        "random_features",
        {"projected": (2, 1, 3, 3), "source": (2, 2, 3, 4)},
        (0.5, -2.0, True, 1, 1e-5),
        r"source has shape \[2, 2, 3, 4\]; it must be \[2, 1, 3, 4\]",
    ),
    *(
        ("gate", {"x": shape, **dict.fromkeys(GATED), **others}, (*how, 0.0, 1.0), message)
        for shape, others, how, message in (
            ((2, 3), {}, (0, 0), r"x has shape \[2, 3\]"),
            ((2, 1, 3), {}, (4, 0), "activation is 4; it must be from 0 to 3"),
            ((2, 1, 3), {}, (0, 3), "norm is 3; it must be from 0 to 2"),
            ((2, 1, 3), {"bias": (2,)}, (0, 0), r"bias has shape \[2\]; it must be \[3\]"),
            ((2, 1, 3), {"log_rate": (2,)}, (0, 0), "log_rate has 2 numbers for 3 channels"),
            ((2, 1, 3), {"y": (1, 2, 3)}, (0, 0), r"y has shape \[1, 2, 3\]; it must be \[2, 1, 3\]"),
            ((2, 1, 3), {"weight": (3,)}, (0, 0), "weight was given without a norm"),
            ((2, 1, 4), {"y": (2, 1, 4)}, (0, 1), r"y has shape \[2, 1, 4\]; it must be \[2, 1, 4, 1\]"),
            ((2, 1, 4), {"y": (2, 1, 2, 2), "weight": (4,)}, (0, 1), r"weight has shape \[4\]; it must be \[2\]"),
            ((2, 1, 4), {"bias": (4,)}, (0, 1), "a norm is of y alone"),
        )
    ),
    (
        "gate_backward",
        {"d_out": (2, 1), "x": (2, 1, 3), **dict.fromkeys(GATED)},
        (0, 0, 0.0, 1.0),
        r"d_out has shape \[2, 1\]; it must be \[2, 1, 3\]",
    ),
    *(
        ("short_convolution", _CONVOLUTION | changed, (), message)
        for changed, message in (
            ({"x": (2, 3)}, r"x has shape \[2, 3\]"),
            ({"weight": (2, 4)}, r"weight has shape \[2, 4\]; it must be \[3, 4\]"),
            ({"bias": (4,)}, r"bias has shape \[4\]; it must be \[3\]"),
            ({"before": (2, 4, 3)}, r"before has shape \[2, 4, 3\]; it must be \[2, 3, 3\]"),
            ({"lengths": (3,)}, r"lengths has shape \[3\]; it must be \[2\]"),
            ({"starts": (5, 2)}, r"starts has shape \[5, 2\]; it must be \[2, 5\]"),
        )
    ),
]


@pytest.mark.parametrize(("name", "shapes", "how", "message"), WRONG_CALLS)
def test_operators_refuse_what_they_would_read_beyond(name, shapes, how, message):
    backends.why_not(DEVICE.type, torch.float32)
    dtypes = {"lengths": torch.int64, "starts": torch.bool}
    tensors = [x and torch.zeros(x, dtype=dtypes.get(n), device=DEVICE) for n, x in shapes.items()]
    of_dtype = (torch.float32,) if name in ("map_features", "random_features", "gate") else ()
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.fairseq_fastweights, name)(*tensors, *how, *of_dtype)


def test_no_kernel_for_a_device():
    x = torch.zeros(1, 1, 1, 4, device="meta")
    assert map_features(x, "dpfp").shape == (1, 1, 1, 8)
    assert gate(x[0, 0], "softplus", log_rate=x[0, 0, 0, :2]).shape == (1, 4)
    for call in (map_features, partial(gate, activation="softplus")):
        with pytest.raises(BackendUnavailable, match="devices of type meta"):
            call(x, backend="native")


FORMS = {
    "activation": (),
    "bias": ("bias",),
    "factor": ("y",),
    "rate": ("bias", "log_rate"),
    "rms": ("y", "weight"),
    "layer": ("y",),
}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="what a CPU is called for")
@pytest.mark.parametrize("form", FORMS)
def test_few_numbers_take_the_operators_that_are_faster(form, monkeypatch):
    norm = form if form in NORMS else "none"
    called = []
    monkeypatch.setattr(elementwise, "_gate", lambda x, *others: called.append(x.numel()) or x)
    for dtype, first in zip((torch.float32, torch.bfloat16), elementwise.FASTER_FROM[form], strict=True):
        sizes = [4] if first in (0, elementwise.NEVER) else [first - 4, first]
        called.clear()
        for size in sizes:
            x = torch.zeros(size // 4, 4, dtype=dtype)
            known = {"y": x if norm == "none" else x.view(-1, 2, 2), "weight": x.new_ones(2)}
            gate(x, "silu", **{name: known.get(name, x.new_zeros(4)) for name in FORMS[form]}, norm=norm)
        assert called == [size for size in sizes if size >= first]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="what a CPU is called for")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_of_one_dtype_takes_operators_as_they_are(dtype, monkeypatch):
    monkeypatch.setattr(elementwise, "_gate", None)
    for activation, f in ACTIVATIONS.items():
        inputs = {"x": drawn(40, 8, dtype=dtype), "y": drawn(40, 8, dtype=dtype, seed=1)}
        found, dx, dy = both_ways(partial(gate, activation=activation, dtype=dtype), inputs)
        assert torch.equal(found, inputs["y"] * f(inputs["x"]))
        assert torch.equal(gate(inputs["x"], activation, dtype=dtype), f(inputs["x"]))
        exact = both_ways(
            partial(gate, activation=activation, backend="reference"), {name: x.double() for name, x in inputs.items()}
        )
        for one, other in zip((found, dx, dy), exact, strict=True):
            assert relative_error(one, other) < 2 * TOLERANCE[dtype]  # rounded twice
        rounded_once = f(inputs["x"].float()) * inputs["y"].float()
        assert torch.equal(gate(inputs["x"], activation, y=inputs["y"]), rounded_once)
