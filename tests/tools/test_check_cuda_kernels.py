"""ptxas says what a kernel takes; registers that spill where a shape is tuned for are a fault."""

import os
from pathlib import Path

import check_cuda_kernels
import pytest
from check_cuda_kernels import SMALL_SPILLS, Kernel, read_compiler_output
from native_toolchain import Nvcc, Unavailable

OUTPUT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN19fairseq_fastweights5tunedILi4EEEvPf' for 'sm_80'
ptxas info    : Function properties for _ZN19fairseq_fastweights5tunedILi4EEEvPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 8 bytes cumulative stack size, 2048 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 12.3 ms
ptxas info    : Compiling entry function '_Z13large_genericPf' for 'sm_80'
ptxas info    : Function properties for _Z13large_genericPf
    16 bytes stack frame, 16 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, 360 bytes cmem[0]
ptxas info    : Function properties for __internal_accurate_pow
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to more in 'tuned'
kernel.cu(3): warning #177-D: variable "x" was declared but never referenced
"""


def test_what_ptxas_says_is_read_and_warnings_and_spills_are_faults() -> None:
    """Spills, but where no shape is tuned for, and where they are small and known."""
    (tuned, generic), (serialized, warning, spill) = read_compiler_output(OUTPUT)
    assert tuned.name in ("tuned<4>", "_ZN19fairseq_fastweights5tunedILi4EEEvPf")  # without a c++filt
    assert tuned == Kernel(tuned.name, "sm_80", 128, 4, 12)
    assert generic == Kernel(generic.name, "sm_80", 255, 16, 16) and generic.fault is None
    assert [serialized, warning] == OUTPUT.splitlines()[-2:]
    assert spill == f"{tuned.name} spills registers: 4 bytes stored, 12 loaded"
    for kernel, is_fault in (
        *((Kernel(f"{name}more", "sm_80", 9, n, most), n > 0) for name, most in SMALL_SPILLS.items() for n in (0, 1)),
        *((Kernel("forward<float, 64>", "sm_80"), False), (Kernel("forward<float>", "sm_80", 9, 4), True)),
        *((Kernel(f"forward{x}", "sm_80", 9, 4), False) for x in ("_generic<float>", "Generic", "<double>")),
    ):
        assert bool(kernel.fault) == is_fault, kernel


@pytest.fixture
def nvcc() -> None:
    try:
        Nvcc.find()
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_what_does_not_compile_fails(nvcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    source = tmp_path / "broken.cu"
    monkeypatch.setattr(check_cuda_kernels, "ROOT", tmp_path)
    for text, status, says in (("no_such_thing();", 1, "broken.cu, sm_80: does not compile"), ("", 0, "sm_80")):
        source.write_text(f"__global__ void kernel() {{ {text} }}\n")
        assert check_cuda_kernels.main(["--architectures", "80", "--", str(source)]) == status
        assert says in "".join(capsys.readouterr())


def test_an_architecture_that_nvcc_does_not_know_is_refused(nvcc: None, capsys) -> None:
    assert check_cuda_kernels.main(["--architectures", "95"]) == 2
    assert "error: --architectures names 95; let it name some of " in capsys.readouterr().err


@pytest.mark.emulated  # minutes, even where all cores are free
def test_the_kernels_compile_and_do_not_spill(nvcc: None, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        monkeypatch.setenv("MAX_JOBS", "1")  # the other cores have other tests to run
    status = check_cuda_kernels.main([])
    printed = capsys.readouterr()
    assert status == 0, f"{printed.err}\n{printed.out}"
