"""ptxas reports the registers of a kernel; spilled registers of a tuned kernel are a fault."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import check_cuda_kernels
import pytest
from check_cuda_kernels import SMALL_SPILLS, Kernel, Listing, nvdisasm, read_compiler_output, read_ptx
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


def test_the_report_of_ptxas_is_read_and_warnings_and_spills_are_faults() -> None:
    """Spills are, except in generic kernels, and where they are small and known."""
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


PTX = """.visible .entry kernel(
)
{
    mov.f32 %f1, 0f00000000;
    wgmma.fence.sync.aligned;
    add.s64 %rd1, %rd2, 16;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1,
      %f2}, {%r1,%r2,%r3,%r4}, %rd1, 1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    mov.f32 %f1, %f3;
}
"""


@pytest.mark.parametrize(
    ("late", "fault"),
    [
        ("mov.f32 %f2, 0f00000000;", "kernel: writes %f2 of wgmma after wgmma.fence"),
        ("@%p1 mov.b32 %r3, %r9;", "kernel: writes %r3 of wgmma after wgmma.fence"),
        ("@%p1 bra $L__BB0_2;", "kernel: a branch within a group of wgmma"),
        ("$L__BB0_2:", "kernel: a branch within a group of wgmma"),
    ],
)
def test_hazards_of_wgmma_are_faults(late: str, fault: str) -> None:
    assert read_ptx(PTX) == []
    assert read_ptx(PTX.replace("    add.s64", f"{late}\n    add.s64")) == [fault]


@pytest.fixture
def nvcc() -> None:
    try:
        Nvcc.find()
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_sources_that_do_not_compile_fail(nvcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
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


LISTING = """\
        /*0000*/                   ISETP.NE.AND P0, PT, R1, RZ, PT ;
.L_x_1:
        /*0010*/                   MUFU.EX2 R2, R3 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   LDG.E.U16 R4, desc[UR4][R6.64] ;
        /*0040*/                   FMUL R2, R2, R2 ;
        /*0050*/                   FMUL R2, R2, R2 ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   MUFU.EX2 R8, R3 ;
        /*0080*/               @P1 STG.E.128 desc[UR4][R6.64], R8 ;
.L_x_3:
        /*0090*/                   BRX R12 -0x90     (*"BRANCH_TARGETS .L_x_1,.L_x_4"*)
.L_x_4:
        /*00a0*/                   EXIT ;
.L_x_5:
        /*00b0*/                   BRA `(.L_x_5);
"""


def test_instructions_are_counted_on_the_way_that_computes_and_stores_most() -> None:
    """A kernel without a loop that stores 16 bytes has no count."""
    listing = Listing(LISTING)
    assert listing.loop() == (1, 2, 5)
    assert min(listing.cheapest(0, {-1}).values()) == 7
    assert Listing(LISTING.replace("128", "64")).loop() is None


MOST_INSTRUCTIONS = {  # forwards, backwards; of a convolution a thread has 32 steps, of a gate 64 numbers
    "convolution": ("convolve<(float|__half|__nv_bfloat16), [234]>", 30, "differentiate<.+, [234]>", 60),
    "gating": (r"gate<(\w+), (\1|float), false, false, ", 31, r"gate<(\w+), (\1|float), true, false, ", 50),
    "gating of norms": (r"gate<(\w+), (\1|float), false, true, ", 39, r"gate<(\w+), (\1|float), true, true, ", 62),
}


@pytest.mark.emulated  # half a minute of two cores
def test_convolutions_and_gates_take_few_instructions_for_an_element(nvcc: None) -> None:
    try:
        nvdisasm(Nvcc.find())
    except Unavailable as reason:
        pytest.skip(str(reason))
    with ThreadPoolExecutor(1 if "PYTEST_XDIST_WORKER" in os.environ else 2) as pool:
        files = [check_cuda_kernels.ROOT / f"cuda/{name}.cu" for name in check_cuda_kernels.COUNTED]
        counts = [each for own in pool.map(partial(check_cuda_kernels.count, Nvcc.find()), files) for each in own]
    for name, (forward, most_forward, backward, most_backward) in MOST_INSTRUCTIONS.items():
        for pattern, most in ((forward, most_forward), (backward, most_backward)):
            found = [each for each in counts if re.match(pattern, each.kernel)]
            assert len(found) == (9 if name == "convolution" else 5)
            for each in found:
                elements = 64 if "gate" in each.kernel else 32 * (4 if "float" in each.kernel else 8)
                assert each.of_element + each.once / elements <= most, each
