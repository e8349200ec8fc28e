"""The emulator itself: it runs correct kernels, and notices faults."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
import torch
from kernel_accesses import PLAN, Count, count, kernels_of, main

from tests.cuda.build import SHIM, build
from tests.cuda.emulated import Emulator
from tests.ops.rules import RULE

PROBES = ("right", "missing barrier", "divergent barrier", "divergent warp", "beyond shared", "before shared")
PROBES += ("misaligned", "missing wait", "uninitialised", "absent lane", "overtaken")
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
    for name in ("missing barrier", "overtaken"):
        results = [run(probes, name, schedule)[2] for schedule in (0, 1)]
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


def skip_without_counts(cxx: str) -> None:
    if "clang" in cxx or shutil.which("addr2line") is None:
        pytest.skip("needs g++ and addr2line")


@pytest.mark.parametrize(
    ("stride", "wide", "wavefronts", "sectors"),
    # Of 32 lanes' numbers of 4 bytes, then of 16: a word of each bank at a time, 32 bytes of global memory.
    [(1, 0, 1, 4), (2, 0, 2, 8), (3, 0, 1, 12), (8, 0, 8, 32), (32, 0, 32, 32), (1, 1, 4, 16), (2, 1, 8, 32)],
)
def test_accesses_are_counted(cxx, stride, wide, wavefronts, sectors):
    skip_without_counts(cxx)
    library = build((SHIM / "probes.cu",), counts=True)
    probes = Emulator(library)
    numbers, out = torch.zeros(32 * 32 * 4), torch.zeros(32 * 4)
    probes.library.emulation_count()
    for x in (numbers, out):
        probes.library.emulation_watch(x.data_ptr(), x.nbytes)
    run = probes.library.run_move
    assert run(ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(numbers.data_ptr()), stride, wide) == 0
    [kernel] = kernels_of(probes, library)
    shared, whole = kernel.sum(shared=True), kernel.sum(shared=False)
    least = (1, 4) if not wide else (4, 16)
    assert kernel.blocks == 1 and shared == Count(2, 2 * wavefronts, 2 * least[0])
    assert whole == Count(2, sectors + least[1], 2 * least[1])
    assert kernel.name.startswith("move<float") and all(
        line.startswith("emulation/probes.cu:") for _, line in kernel.lines
    )


def test_an_unknown_rule_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["delta", "lstm"])
    assert "no such rule: 'lstm' (of sum, gated, " in capsys.readouterr().err


@pytest.mark.emulated
def test_stages_for_all_chunks_wait_for_no_bank(cxx, monkeypatch):
    skip_without_counts(cxx)
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", PLAN)
    for kernel in count(RULE["delta"], 64, 64, torch.bfloat16):
        if kernel.name.startswith(("gradients", "outputs")):
            shared = kernel.sum(shared=True)
            assert shared.asked == shared.needed > 500, kernel


GROUP_FAULTS = ("none", "not shown", "shown too early", "no fence", "no commit", "no wait", "replaced", "three warps")


def unit_addresses(width: int, transposed: bool) -> tuple[np.ndarray, int, int]:
    """Addresses of a right factor's units, 8 neighbours each, by row and unit; its leading and stride offsets.

    Rows are the 16 inner places of 64 columns if it is transposed, else the 64 columns. They are swizzled in rows of
    `width` units of 16 bytes or, for 1, as pieces whose columns have a gap of one between them.
    """
    rows, units = (16, 8) if transposed else (64, 2)
    row, unit = np.mgrid[:rows, :units]
    if width == 1:
        between_units = rows * 16 + 16
        address = unit * between_units + row * 16
        return address, *((128, between_units) if transposed else (between_units, 128))
    between_blocks = rows * width * 16
    swizzled = unit % width ^ row % 8 * width // 8
    return unit // width * between_blocks + row * width * 16 + swizzled * 16, between_blocks, 128 * width


def in_memory(factor: np.ndarray, width: int, transposed: bool) -> tuple[np.ndarray, int]:
    """The bytes of a factor (inner, columns), and a descriptor of where it begins."""
    address, leading, stride = unit_addresses(width, transposed)
    memory = np.full(address.max() + 16, 0xFF, dtype=np.uint8)
    rows = bfloat16_bits(factor if transposed else factor.T).reshape(*address.shape, 8)
    for at, unit in zip(address.ravel(), rows.reshape(-1, 8), strict=True):
        memory[at : at + 16] = unit.view(np.uint8)
    return memory, leading // 16 << 16 | stride // 16 << 32 | {1: 0, 8: 1, 4: 2, 2: 3}[width] << 62


def multiply_in_group(probes, width, transposed, fault="none", change=0, turned=None, change_left=0):
    """The result, and the right one. Changes are added to descriptors; with `turned` the left factor has one too."""
    random = np.random.default_rng(width)
    a, c = random.integers(-8, 9, (64, 16)), random.integers(-8, 9, (64, 64))
    b = random.integers(-8, 9, (16, 64))
    memory, descriptor = in_memory(b, width, transposed)
    of_left = 0
    if turned is not None:
        start = -(-len(memory) // 1024) * 1024
        left_memory, of_left = in_memory(a.T, width, turned)
        memory = np.concatenate([memory, np.full(start - len(memory), 0xFF, dtype=np.uint8), left_memory])
        of_left += start // 16 + change_left
    # A thread has two rows, and of each 8 columns two: accumulators; left factors likewise, in the order of mma.sync.
    thread, i = np.mgrid[:128, :32]
    row, column = thread // 32 * 16 + thread % 32 // 4 + i % 4 // 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
    d = c[row, column].astype(np.float32)
    thread, i = np.mgrid[:128, :8]
    left = bfloat16_bits(a[thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2])
    run, number = probes.run_multiply_in_group, ctypes.c_uint64
    code = run(
        *map(pointer, (d, left, memory)),
        len(memory),
        number(of_left),
        bool(turned),
        number(descriptor + change),
        transposed,
        GROUP_FAULTS.index(fault),
    )
    return (probes.emulation_error().decode() if code else d), (c + a @ b)[row, column]


def bfloat16_bits(x):
    """Bits of small integers as bfloat16."""
    return (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


LAYOUTS = [(width, transposed) for width in (1, 2, 4, 8) for transposed in (False, True)]


@pytest.mark.parametrize(("width", "transposed"), LAYOUTS)
def test_wgmma_reads_by_its_descriptor_and_a_wrong_one_is_noticed(probes, width, transposed):
    actual, expected = multiply_in_group(probes, width, transposed)
    assert np.array_equal(actual, expected)
    changes = {"start": 1, "leading": 1 << 16, "stride": 1 << 32, "swizzling": 1 << 62}
    if width > 1 and (not transposed or width == 8):
        del changes["leading"]  # 16 inner places, or 64 columns, lie in one row
    for change in changes.values():
        actual, expected = multiply_in_group(probes, width, transposed, change=change)
        assert isinstance(actual, str) or not np.array_equal(actual, expected)
    actual, expected = multiply_in_group(probes, width, transposed, change=1 << 10)
    assert "bytes into shared memory, of which the launch has" in actual


@pytest.mark.parametrize(("width", "turned"), LAYOUTS)
def test_wgmma_reads_a_left_factor_likewise(probes, width, turned):
    actual, expected = multiply_in_group(probes, width, not turned, turned=turned)
    assert np.array_equal(actual, expected)
    for change in (1, 1 << 32):
        actual, expected = multiply_in_group(probes, width, not turned, turned=turned, change_left=change)
        assert isinstance(actual, str) or not np.array_equal(actual, expected)


@pytest.mark.parametrize("fault", GROUP_FAULTS[1:])
def test_a_missing_wait_for_wgmma_is_noticed(probes, fault):
    actual, expected = multiply_in_group(probes, 1, False, fault)
    messages = {"no fence": "wgmma without a wgmma.fence", "three warps": "barrier divergence"}
    if fault in messages:
        assert messages[fault] in actual
    elif fault == "replaced":
        assert not np.array_equal(actual, expected)
    else:
        assert np.isnan(actual).all()
