"""The emulator itself: it runs what is right, and shows what is wrong."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

PROBES = ("right", "missing barrier", "divergent barrier", "divergent warp", "beyond shared", "before shared")
PROBES += ("misaligned", "missing wait", "uninitialised", "absent lane")
THREADS = 64


def pointer(x):
    return ctypes.c_void_p(x.ctypes.data)


@pytest.fixture
def probes(small_emulator):
    return small_emulator.library


def run(probes, name, schedule=0):
    out = np.zeros(THREADS, dtype=np.float32)
    numbers = np.arange(THREADS, dtype=np.float32)
    probes.emulation_schedule(schedule)
    code = probes.run_probe(pointer(out), pointer(numbers), THREADS, PROBES.index(name))
    probes.emulation_schedule(0)
    return code, probes.emulation_error().decode() if code else "", out


@pytest.mark.parametrize("schedule", [0, 1, 7])
def test_a_right_kernel_runs_in_any_order(probes, schedule):
    code, _, out = run(probes, "right", schedule)
    assert code == 0 and (out == (THREADS - 1 - np.arange(THREADS)).reshape(-1, 2)[:, ::-1].ravel()).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent barrier", "barrier divergence"),
        ("divergent warp", "different operations"),
        ("beyond shared", "256 bytes into shared memory, of which the launch has 256"),
        ("before shared", "before the start of shared memory"),
        ("misaligned", "misaligned"),
        ("absent lane", "which its mask 0000ffff leaves out"),
    ],
)
def test_a_mistake_is_an_error_of_the_launch(probes, cxx, name, message):
    if name == "misaligned" and "clang" in cxx:
        pytest.skip("only g++ compiles the trap for misaligned accesses in")
    code, error, _ = run(probes, name)
    assert code == 719 and message in error


def test_early_reads_give_nan_and_races_differ_in_another_order(probes):
    for name in ("missing wait", "uninitialised"):
        code, _, out = run(probes, name)
        assert code == 0 and np.isnan(out).all()
    results = [run(probes, "missing barrier", schedule)[2] for schedule in (0, 1)]
    assert not np.array_equal(*results, equal_nan=True)


def test_a_launch_beyond_the_device_is_refused(probes):
    numbers = np.zeros(2048, dtype=np.float32)
    assert probes.run_probe(pointer(numbers), pointer(numbers), 2048, 0) == 9


def test_movmatrix_transposes(probes):
    """A lane has two neighbours of a row, of four lanes to a row of 8."""
    square = np.arange(64, dtype=np.uint16).reshape(8, 8)
    transposed = np.zeros((8, 8), dtype=np.uint16)
    assert probes.run_transpose(pointer(transposed), pointer(square)) == 0
    assert np.array_equal(transposed, square.T)


@pytest.mark.parametrize(("kind", "depth", "digits"), [(0, 16, 11), (1, 16, 8), (2, 8, 11)])
def test_tensor_core_products(probes, kind, depth, digits):
    """float16, bfloat16 and tf32, on operands of so few binary digits that every product and sum is exact."""
    random = np.random.default_rng(kind)
    most = 2 ** (digits - 1)
    a, b, c = (
        random.integers(-most, most, shape).astype(np.float32) / 64 for shape in ((16, depth), (depth, 8), (16, 8))
    )
    b = np.round(b)  # so that the sums fit float32's 24 digits
    a = np.sign(a) * np.floor(np.abs(a) * 4) / 4
    d = np.full((16, 8), np.nan, dtype=np.float32)
    assert probes.run_multiply(pointer(d), pointer(a), pointer(b), pointer(c), kind) == 0
    expected = a.astype(np.float64) @ b + c
    assert np.array_equal(d, expected.astype(np.float32))


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["float16", "bfloat16", "tf32"])
def test_tensor_cores_cut_sums_off(probes, kind):
    """Towards zero, of either sign: 1 + 3/4 of its last digit stays 1; but the products are added up first."""
    depth, digit = 8 if kind == 2 else 16, 2.0**-23
    a, b = np.zeros((16, depth), dtype=np.float32), np.full((depth, 8), 2.0**-12, dtype=np.float32)
    c = np.ones((16, 8), dtype=np.float32)
    a[:, 0] = 0.75 * 2.0**-11
    a[1:, 1] = 0.5 * 2.0**-11
    a[8:] *= -1
    c[8:] *= -1
    d = np.empty((16, 8), dtype=np.float32)
    assert probes.run_multiply(pointer(d), pointer(a), pointer(b), pointer(c), kind) == 0
    assert (d[0] == 1).all() and (d[1:8] == 1 + digit).all() and (d[8:] == -1 - digit).all()
