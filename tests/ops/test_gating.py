"""Gates and gated norms as one operation: the kernel against the definition, outputs and gradients."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import forward_ad

from fairseq_fastweights.ops import backends, elementwise
from fairseq_fastweights.ops.checks import BackendUnavailable
from fairseq_fastweights.ops.elementwise import ACTIVATIONS, NORMS, gate
from tests.ops.agreement import relative_error
from tests.ops.rules import DEVICE

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
"""Of norms. Outputs are rounded once, to float32; gradients of 16 bits to these."""

# (time, batch, heads, dim): one number; a few channels; no power of two; more than a task; no steps.
SIZES = [(1, 1, 1, 1), (5, 3, 2, 4), (7, 2, 3, 37), (130, 2, 8, 16), (0, 2, 2, 4)]


def drawn(*shape, dtype=torch.float32, seed=0):
    x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(DEVICE, dtype)


def both_ways(backend, how, inputs):
    """The result, and the gradients of all inputs."""
    given = {name: x.detach().clone(memory_format=torch.preserve_format) for name, x in inputs.items()}
    given = {name: x.requires_grad_() for name, x in given.items()}
    out = gate(backend=backend, **how, **given)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, tuple(given.values()), d_out)]


def check(how, inputs, dtype):
    found = both_ways("native", how, inputs)
    wanted = both_ways("reference", how, {name: x.double() for name, x in inputs.items()})
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative_error(found[0], wanted[0]) < min(TOLERANCE[dtype], 1e-6)
    for name, one, other in zip(inputs, found[1:], wanted[1:], strict=True):
        assert one.dtype == inputs[name].dtype, name
        # The terms that a norm adds to a gradient nearly cancel against the others, as do the terms of sums.
        assert relative_error(one, other) < 20 * TOLERANCE[dtype], name


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
        check({"activation": activation, "scale": 0.7}, inputs, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", NORMS[1:])
def test_gated_norms_are_their_definition(norm, dtype):
    for (time, batch, heads, dim), activation in product(SIZES[1:], ACTIVATIONS):
        inputs = {
            "x": drawn(time, batch, heads * dim, dtype=dtype),
            "y": drawn(batch, time, heads, dim, dtype=dtype, seed=1).transpose(0, 1),
        }
        inputs |= {"weight": drawn(dim, dtype=dtype, seed=2)} if activation != "sigmoid" else {}
        check({"activation": activation, "norm": norm, "eps": 1e-3}, inputs, dtype)


LAYOUTS = {
    "every other channel": lambda x: x[..., ::2],
    "channels first": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "one step for all": lambda x: x[:1].expand(4, -1, -1),
    "a step": lambda x: x[0],
    "one number of each": lambda x: x[0, 0],
    "more dimensions": lambda x: x[None],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    x, y = (LAYOUTS[layout](drawn(3, 2, 8, seed=seed)) for seed in range(2))
    heads = y.unflatten(-1, (2, -1))
    for how in ({}, {"y": y}, {"y": heads, "norm": "rms"}):
        out = gate(x, "silu", dtype=torch.bfloat16, backend="native", **how)
        assert out.dtype == torch.bfloat16 and out.shape == x.shape
        torch.testing.assert_close(out, gate(x, "silu", dtype=torch.bfloat16, backend="reference", **how))
    x = x.detach().requires_grad_()
    for d_out in (torch.ones(1).expand(x.shape), torch.ones(x.shape[::-1]).permute(*range(x.dim())[::-1])):
        found, wanted = (
            torch.autograd.grad(gate(x, "silu", y=y, backend=backend), x, d_out)[0]
            for backend in ("native", "reference")
        )
        torch.testing.assert_close(found, wanted)


EXTREMES = (-math.inf, -1e30, -200.0, -90.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 90.0, 1e30, math.inf, math.nan)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_logits(activation):
    x = torch.tensor(EXTREMES, device=DEVICE)
    for backend, dtype in (("native", torch.float32), ("native", torch.float64)):
        found, slope = both_ways(backend, {"activation": activation}, {"x": x.to(dtype)})
        wanted, steepness = both_ways("reference", {"activation": activation}, {"x": x.double()})
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-37, equal_nan=True, check_dtype=False)
        finite = wanted.isfinite() & steepness.isfinite()
        close(found[finite], wanted[finite])
        close(slope[finite], steepness[finite])
        assert bool(found[-1].isnan()) and bool(slope[-1].isnan())


def test_what_is_not_finite_stays_in_its_channel_or_head():
    x, y = drawn(3, 2, 8), drawn(3, 2, 8, seed=1)
    x[1, 0, 3] = math.nan
    found, *gradients = both_ways("native", {"activation": "silu"}, {"x": x, "y": y})
    assert all(int(z.isnan().sum()) == 1 for z in (found, *gradients))
    found, d_x, d_y = both_ways("native", {"activation": "silu", "norm": "rms"}, {"x": x, "y": y.unflatten(-1, (2, 4))})
    assert [int(z.isnan().sum()) for z in (found, d_x, d_y)] == [1, 1, 4]


CASES = [
    {"bias": (4,), "log_rate": (2,), "y": (2, 1, 4)},
    {"y": (2, 1, 2, 2), "weight": (2,), "norm": "rms"},
    {"y": (2, 1, 2, 2), "norm": "layer"},
]


@pytest.mark.parametrize("case", CASES)
def test_operators_derivatives_and_compilation(case):
    norm = case.get("norm", "none")
    given = {name: drawn(*shape, dtype=torch.float64) for name, shape in case.items() if name != "norm"}
    x = drawn(2, 1, 4, dtype=torch.float64, seed=5)
    tensors = [x, *(given.get(name) for name in ("bias", "log_rate", "y", "weight"))]
    tensors = [z if z is None else (z / 3).requires_grad_() for z in tensors]
    how = 1, NORMS.index(norm), 1e-3, 0.7
    forward, backward = (getattr(torch.ops.fairseq_fastweights, f"gate{end}") for end in ("", "_backward"))
    torch.library.opcheck(forward, (*tensors, *how, torch.float32))
    detached = [z if z is None else z.detach() for z in tensors]
    torch.library.opcheck(backward, (x, *detached, *how))

    def run(x, *others, backend="native"):
        names = [
            name for name, z in zip(("bias", "log_rate", "y", "weight"), tensors[1:], strict=True) if z is not None
        ]
        given = dict(zip(names, others, strict=True))
        return gate(x, "silu", norm=norm, eps=1e-3, scale=0.7, backend=backend, **given)

    wanted = [z for z in tensors if z is not None]
    assert torch.autograd.gradcheck(run, wanted)
    # Second derivatives are those of the definition.
    assert torch.autograd.gradgradcheck(run, wanted, atol=1e-4)
    compiled = torch.compile(lambda *z: run(*z).square().sum(), backend="aot_eager", fullgraph=True)
    for one, other in zip(
        torch.autograd.grad(compiled(*wanted), wanted),
        torch.autograd.grad(run(*wanted).square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert forward_ad.unpack_dual(run(dual, *(z.detach() for z in wanted[1:]), backend="auto")).tangent is not None


REFUSED = [
    ({"activation": "tanh"}, "activation is 'tanh'; it must be one of sigmoid, silu, log_sigmoid, softplus"),
    ({"norm": "group"}, "norm is 'group'; it must be one of none, rms, layer"),
    ({"bias": torch.zeros(3)}, r"bias has shape \(3,\); it must be \(4,\)"),
    ({"log_rate": torch.zeros(3)}, r"log_rate has shape \(3,\); it must be \(rates,\), of which the 4 channels"),
    ({"y": torch.zeros(2, 5)}, r"y has shape \(2, 5\); it must be \(2, 4\)"),
    ({"weight": torch.zeros(4)}, "weight was given and norm is 'none'"),
    ({"norm": "rms"}, "norm is 'rms'; there must be y"),
    ({"norm": "rms", "y": torch.zeros(2, 2, 2), "bias": torch.zeros(4)}, "there must be y, and neither bias"),
    ({"norm": "rms", "y": torch.zeros(2, 4)}, r"y has shape \(2, 4\); it must be \(..., heads, dim\)"),
    ({"norm": "rms", "y": torch.zeros(3, 2, 2)}, r"y has shape \(3, 2, 2\); it must be \(2, 2, 2\)"),
    ({"norm": "rms", "y": torch.zeros(2, 2, 2), "weight": torch.zeros(4)}, r"weight has shape \(4,\)"),
    ({"backend": "fast"}, "backend is 'fast'"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED)
def test_refusals(how, message):
    with pytest.raises(ValueError, match=message):
        gate(torch.zeros(2, 4), **{"activation": "silu"} | how)


WRONG_CALLS = [
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
]


@pytest.mark.parametrize(("shape", "others", "how", "message"), WRONG_CALLS)
def test_operators_refuse_what_they_would_read_beyond(shape, others, how, message):
    backends.why_not(DEVICE.type, torch.float32)
    given = [
        torch.zeros(others[x], device=DEVICE) if x in others else None for x in ("bias", "log_rate", "y", "weight")
    ]
    x = torch.zeros(shape, device=DEVICE)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fairseq_fastweights.gate(x, *given, *how, 0.0, 1.0, torch.float32)
    if x.dim() == 3 and not others and how == (0, 3):
        with pytest.raises(RuntimeError, match=r"d_out has shape \[2, 1\]; it must be \[2, 1, 3\]"):
            torch.ops.fairseq_fastweights.gate_backward(x[..., 0], x, *given, 0, 0, 0.0, 1.0)


def test_no_kernel_for_a_device():
    x = torch.zeros(2, 4, device="meta")
    assert gate(x, "softplus", log_rate=x[0, :2]).shape == (2, 4)
    with pytest.raises(BackendUnavailable, match="devices of type meta"):
        gate(x, "softplus", backend="native")


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
        found, dx, dy = both_ways("auto", {"activation": activation, "dtype": dtype}, inputs)
        assert torch.equal(found, inputs["y"] * f(inputs["x"]))
        assert torch.equal(gate(inputs["x"], activation, dtype=dtype), f(inputs["x"]))
        exact = both_ways("reference", {"activation": activation}, {name: x.double() for name, x in inputs.items()})
        for one, other in zip((found, dx, dy), exact, strict=True):
            assert relative_error(one, other) < 2 * TOLERANCE[dtype]  # rounded twice
        rounded_once = f(inputs["x"].float()) * inputs["y"].float()
        assert torch.equal(gate(inputs["x"], activation, y=inputs["y"]), rounded_once)
