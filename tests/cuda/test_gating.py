"""Gates, gated norms and short convolutions, emulated; the tests of `ops` also run through the binding."""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import product

import pytest
import torch

from fairseq_fastweights.mixers.short_convolution import short_convolution
from fairseq_fastweights.ops.elementwise import ACTIVATIONS, NORMS, gate
from tests.cuda.emulated import DTYPES, KINDS, StridedSequence

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-13}


def drawn(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows(x, *, time_first=False):
    outer, inner, head = *x.stride()[:2], x.stride(2) if x.dim() == 4 else 0
    strides = (inner, outer, head) if time_first else (outer, inner, head)
    return StridedSequence(x.data_ptr(), *strides, DTYPES[x.dtype])


def nan(*shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype)


def agree(found, wanted, dtype):
    for name, x in found.items():
        assert float((x.double() - wanted[name]).norm() / (wanted[name].norm() + 1e-30)) < TOLERANCE[dtype], name


def definition(run, inputs, weights):
    """The outputs and gradients of `run`, in float64."""
    wide = {name: x.double().requires_grad_() for name, x in inputs.items()}
    outs = run(**wide)
    gradients = torch.autograd.grad(outs, tuple(wide.values()), [x.double() for x in weights])
    return [x.detach() for x in outs], {f"d_{name}": d for name, d in zip(wide, gradients, strict=True)}


def run_gate(emulator, x, d_out, how, **others):
    """The result and all gradients, of parameters the sums of their parts; all of it starts as NaN."""
    activation, norm, eps, scale = how
    library, y = emulator.library, others.get("y")
    heads, dim = y.shape[2:] if norm else (1, x.shape[2])
    rates = len(others["log_rate"]) if "log_rate" in others else 1
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    params = KINDS["Gating"](*x.shape[:2], heads, dim, rates, activation, norm, eps, scale)
    made = {"out": nan(*x.shape, dtype=d_out.dtype), "dx": torch.full_like(x, torch.nan)}
    made |= {} if y is None else {"dy": torch.full_like(y, torch.nan)}
    for name, tensor in {"x": x, "d_out": d_out, **others, **made}.items():
        setattr(
            params,
            name,
            rows(tensor) if tensor.dim() > 1 else StridedSequence(tensor.data_ptr(), 0, 0, 0, DTYPES[tensor.dtype]),
        )
    parts = library.fastweights_gating_parts(ctypes.byref(params))
    sums = {
        f"d_{name}": nan(parts, dim if name == "weight" else x.shape[2], dtype=precise)
        for name in others
        if name != "y"
    }
    for name, tensor in sums.items():
        setattr(params, name, tensor.data_ptr())
    for way in ("forward", "backward"):
        assert getattr(library, f"fastweights_gating_{way}")(ctypes.byref(params), None) == 0
    totals = {name: parts.sum(0).view(len(others[name[2:]]), -1).sum(1) for name, parts in sums.items()}
    return made | totals


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_are_their_definition(small_emulator, activation, dtype):
    # Projections among others, aligned where 8 are left out before them; fewer channels than threads, more, and no
    # power of two; several parts of sums; types that no kernel is compiled for.
    cases = ((3, 4, 2, False, 1, dtype), (70, 37, 1, True, 1, dtype), (2, 300, 300, True, 1, dtype))
    cases += ((20, 264, 8, True, 8, dtype), (3, 16, 1, False, 8, torch.float32), (5, 24, 3, True, 8, torch.float16))
    for time, channels, rates, multiplies, before, out_dtype in cases:
        x = drawn(time, 2, channels + 16, dtype=dtype)[..., before : before + channels]
        inputs = {"x": x, "bias": drawn(channels, dtype=torch.float32), "log_rate": drawn(rates, dtype=dtype, seed=2)}
        inputs |= {"y": drawn(2, time, channels, dtype=dtype, seed=3).transpose(0, 1)} if multiplies else {}
        d_out = drawn(time, 2, channels, dtype=out_dtype, seed=4)
        run = lambda **given: (gate(given.pop("x"), activation, scale=0.7, backend="reference", **given),)  # noqa: E731
        (out,), wanted = definition(run, inputs, [d_out])
        found = run_gate(
            small_emulator, inputs.pop("x"), d_out, (list(ACTIVATIONS).index(activation), 0, 0.0, 0.7), **inputs
        )
        wanted |= {"out": out, "dx": wanted["d_x"], "dy": wanted.get("d_y")}
        agree(found, wanted, max(dtype, out_dtype, key=TOLERANCE.get))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_gated_norms_are_their_definition(small_emulator, norm, dtype):
    # Vectors of less than a thread's numbers, of several threads, of warps and of a whole block; more heads than a
    # block has; several parts of sums; vectors that are aligned, and not; those of another type; no weight.
    cases = ((2, 3, 4, dtype), (5, 2, 37, dtype), (70, 1, 32, dtype), (2, 300, 8, dtype), (20, 8, 72, torch.float32))
    cases += ((1, 2, 131, dtype), (2, 1, {2: 1500, 4: 1000, 8: 250}[dtype.itemsize], dtype))
    for time, heads, dim, of_y in cases:
        inputs = {
            "x": drawn(time, 2, heads * dim, dtype=dtype),
            "y": drawn(2, time, heads, dim, dtype=of_y, seed=1).transpose(0, 1),
        }
        inputs |= {"weight": drawn(dim, dtype=torch.float32, seed=2)} if heads != 2 else {}
        d_out = drawn(time, 2, heads * dim, dtype=dtype, seed=4)
        how = {"norm": norm, "eps": 1e-3, "scale": 0.7}
        run = lambda **given: (gate(given.pop("x"), "silu", backend="reference", **how, **given),)  # noqa: B023, E731
        (out,), wanted = definition(run, inputs, [d_out])
        found = run_gate(small_emulator, inputs.pop("x"), d_out, (1, NORMS.index(norm), 1e-3, 0.7), **inputs)
        agree(
            found, wanted | {"out": out, "dx": wanted["d_x"], "dy": wanted["d_y"]}, max(dtype, of_y, key=TOLERANCE.get)
        )


def run_convolution(emulator, x, d_y, d_last, lengths, starts, **others):
    """Results and all gradients; all of it starts as NaN."""
    library, (time, batch, channels), width = emulator.library, x.shape, others["weight"].shape[1]
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    made = {"y": nan(*x.shape, dtype=x.dtype), "dx": torch.full_like(x, torch.nan)}
    made["last"] = nan(batch, width - 1, channels, dtype=precise)
    made |= {"d_before": torch.full_like(others["before"], torch.nan)} if "before" in others else {}
    params = KINDS["Convolution"](batch, time, channels, width)
    given = {"x": x, "d_y": d_y, **others, **made} | ({} if d_last is None else {"d_last": d_last})
    for name, tensor in given.items():
        flat = name in ("weight", "bias")
        value = (
            StridedSequence(tensor.data_ptr(), 0, 0, 0, DTYPES[tensor.dtype])
            if flat
            else rows(tensor, time_first=name in ("x", "d_y", "y", "dx"))
        )
        setattr(params, name, value)
    parts = library.fastweights_convolution_parts(ctypes.byref(params))
    room = {"dw": nan(parts, channels, width, dtype=precise), "db": nan(parts, channels, dtype=precise)}
    for name, tensor in {**room, "lengths": lengths, "starts": starts}.items():
        setattr(params, name, None if tensor is None else tensor.data_ptr())
    for way in ("forward", "backward"):
        assert getattr(library, f"fastweights_convolution_{way}")(ctypes.byref(params), None) == 0
    return made | {"d_weight": room["dw"].sum(0)} | ({"d_bias": room["db"].sum(0)} if "bias" in others else {})


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_convolutions_are_their_definition(small_emulator, padded, documents, dtype):
    # Fewer steps than the convolution sees, none, one, and more than a run; more channels than a block has threads;
    # channels that are aligned, and not; widths that kernels are compiled for, and others.
    cases = ((2, 5, 4, 1), (40, 3, 3, 1), (1, 130, 1, 1), (21, 16, 4, 8), (9, 24, 2, 8), (17, 8, 3, 8), (11, 8, 6, 8))
    cases += ((0, 8, 4, 8), (12, 16, 4, 1))
    for (time, channels, width, skipped), given in product(cases, (True, False)):
        lengths = torch.tensor([time, time // 2]) if padded else None
        starts = torch.zeros(2, time, dtype=torch.bool)
        if time:
            starts[0, time // 3], starts[1, 0] = True, time > 1
        x = drawn(time, 2, channels + 16, dtype=dtype)[..., skipped : skipped + channels]
        inputs = {"x": x, "weight": drawn(channels, width, dtype=dtype, seed=1)}
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        if given:
            inputs["bias"] = drawn(channels, dtype=torch.float32, seed=2)
            inputs["before"] = drawn(2, width - 1, channels, dtype=precise, seed=3)
        weights = [drawn(*x.shape, dtype=dtype, seed=4), given * drawn(2, width - 1, channels, dtype=precise, seed=5)]
        where = {"lengths": lengths, "starts": starts if documents else None}
        run = partial(short_convolution, bias=None, before=None, **where, backend="reference")
        (y, last), wanted = definition(run, inputs, weights)
        d_y, d_last = weights[0], weights[1] if given else None
        found = run_convolution(small_emulator, inputs.pop("x"), d_y, d_last, *where.values(), **inputs)
        agree(found, wanted | {"y": y, "last": last, "dx": wanted["d_x"]}, dtype)


def test_threads_may_run_in_any_order(small_emulator):
    x, y, d_out = (drawn(70, 2, 12, dtype=torch.float32, seed=seed) for seed in range(3))
    results = []
    for seed in (0, 1, 7):
        with small_emulator.schedule(seed):
            gated = run_gate(small_emulator, x, d_out, (3, 0, 0.0, 1.0), bias=x[0, 0], log_rate=y[0, 0])
            heads = y.view(70, 2, 3, 4)
            normed = run_gate(small_emulator, x, d_out, (1, 1, 1e-3, 1.0), y=heads, weight=x[0, 0, :4].contiguous())
            convolved = run_convolution(
                small_emulator,
                x,
                d_out,
                y[:2].transpose(0, 1).contiguous(),
                None,
                None,
                weight=x[:6].reshape(12, -1)[:, :3].contiguous(),
            )
            results.append([*gated.values(), *normed.values(), *convolved.values()])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_sizes_that_are_not_taken(small_emulator):
    for kind in ("gating", "convolution"):
        params = KINDS[kind.title()](1, 1, 0, 0)
        assert getattr(small_emulator.library, f"fastweights_{kind}_forward")(ctypes.byref(params), None) != 0
