"""Changed kernels are built anew; those that do not fit are refused; a build that is impossible is no error."""

import ctypes
import fcntl
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import native_build
import native_toolchain
import pytest
import torch
from native_build import LIBRARIES, wait_for
from native_toolchain import HostCompiler, Nvcc, Torch, Unavailable

from fairseq_fastweights.ops import backends, libraries
from tests.conftest import ROOT

THIS_TORCH = str(torch.__version__)

VARIANTS = ["baseline", "avx2", "avx512"] if native_toolchain.is_x86() else ["baseline"]
# A library without torch's headers, which take seconds to compile.
VISIBLE = 'extern "C" __attribute__((visibility("default")))'
CALL = "\n#ifdef FAST_WEIGHTS_HAVE_{}\n+ {}::float32() + {}::float64()\n#endif\n"
CALLS = "".join(CALL.format(name.upper(), name, name) for name in VARIANTS)
SOURCES = {
    "kernels.h": "".join(f"namespace {name} {{ int float32(), float64(); }}\n" for name in VARIANTS),
    "kernels.cpp": '#include "kernels.h"\nint FAST_WEIGHTS_ISA::FAST_WEIGHTS_NUMBERS() { return 1; }\n',
    "dispatch.cpp": f'#include "kernels.h"\nint kernels() {{ return 0{CALLS}; }}\n'
    f'{VISIBLE} const char* fast_weights_instruction_sets() {{ return "baseline"; }}\n',
    "binding.cpp": f"int kernels();\n{VISIBLE} int answer() {{ return 40 + kernels(); }}\n",
}
LIBRARY, RECORD, LOG = (f"fairseq_fastweights/_native_{name}" for name in ("cpu.so", "build.json", "cpu.log"))

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with small sources, in which the kernels are built."""
    for name in "FASTWEIGHTS_BUILD FASTWEIGHTS_BUILD_ISA FASTWEIGHTS_NATIVE_CPU CXX MAX_JOBS".split():
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "checkout"
    for folder in ("cpu", "cuda", "tools", "fairseq_fastweights"):
        (root / folder).mkdir(parents=True)
    files = {f"cpu/{name}": text for name, text in SOURCES.items()}
    for name, text in (files | dict.fromkeys(("cuda/kernel.cu", "tools/native_build.py", RECORD), "")).items():
        (root / name).write_text(text)
    monkeypatch.setattr(native_build, "ROOT", root)
    monkeypatch.setattr(LIBRARIES, "CHECKOUT", root)
    monkeypatch.setattr(LIBRARIES, "PACKAGE", root / "fairseq_fastweights")
    return root


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@needs_compiler
def test_changes_are_built_and_an_interrupted_build_is_not_taken_as_whole(root: Path, monkeypatch, capsys) -> None:
    made: list[str] = []
    whole, interrupted = native_build.run, False

    def run(command: list[str], target: Path, log: Path) -> None:
        made.append(target.suffix)
        if interrupted and target.suffix == ".so":
            raise KeyboardInterrupt
        whole(command, target, log)

    monkeypatch.setattr(native_build, "run", run)
    monkeypatch.setenv("FASTWEIGHTS_BUILD_ISA", "all")
    assert native_build.main([]) == 0
    files = 2 * len(VARIANTS) + 2
    assert f"CPU kernels: {files} of {files}: " in capsys.readouterr().out
    assert ctypes.CDLL(str(root / LIBRARY)).answer() == 40 + 2 * len(VARIANTS)
    entry = json.loads((root / RECORD).read_text())["cpu"]
    assert entry["torch"] == THIS_TORCH and entry["variants"] == VARIANTS and "-O3" in str(entry["flags"])
    for source, compiled in {"binding.cpp": 1, "kernels.cpp": 2 * len(VARIANTS), "kernels.h": files}.items():
        made.clear()
        assert native_build.main([]) == 0 and not made
        with (root / "cpu" / source).open("a") as file:
            file.write("// changed\n")
        interrupted = True
        with pytest.raises(KeyboardInterrupt):
            native_build.main([])
        assert made.count(".o") == compiled and made.count(".so") == 1
        assert "did not finish" in LIBRARIES._load("cpu")
        interrupted = False
        assert native_build.main([]) == 0 and LIBRARIES._load("cpu") is None


@needs_compiler
def test_a_build_that_fails_leaves_a_line_and_a_log_until_it_is_mended(root: Path, capsys) -> None:
    log, binding = root / LOG, root / "cpu/binding.cpp"
    binding.write_text("int answer() { return no_such_thing; }\n")
    assert native_build.main([]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CPU kernels: not built"))
    for told in (line, LIBRARIES._load("cpu")):
        assert "no_such_thing" in told and str(log) in told and "build again" in told and "\n" not in told
    assert "no_such_thing" in log.read_text() and not list(root.glob(f"{LIBRARY}*"))
    # As in a folder that machines share: kernels that this processor does not have are not run.
    binding.write_text(SOURCES["binding.cpp"])
    dispatch = SOURCES["dispatch.cpp"].replace('return "baseline"', 'return ""')
    (root / "cpu/dispatch.cpp").write_text(dispatch)
    assert native_build.main([]) == 0 and not log.exists()
    reason = LIBRARIES._load("cpu")
    assert "which this processor does not have; build them with" in reason and "\n" not in reason


# The environment, the exit status, and the message.
WITHOUT = r"""
PATH=none 0 CPU kernels: not built: .*no C\+\+ compiler.*apt install g\+\+
CXX=old 0 CPU .*old is old \(GCC\) 8.5.0; name g\+\+ 9 or later
CXX=broken 0 CPU .*broken failed \(Killed signal\); let MAX_JOBS be 1
FASTWEIGHTS_BUILD=none 0 (?s)CPU .*FASTWEIGHTS_BUILD was none.*CUDA .*FASTWEIGHTS_BUILD was none
FASTWEIGHTS_BUILD=cuda 1 CPU .*no C\+\+ compiler
FASTWEIGHTS_BUILD=gpu 2 error: .*'gpu'
CXX=broken,FASTWEIGHTS_BUILD_ISA=avx3 0 CPU .*'avx3'; let it be here, all, or some of base""".strip().split("\n")


@pytest.mark.parametrize("case", WITHOUT)
def test_without_a_compiler_only_what_was_asked_for_is_an_error(case: str, root, tmp_path, monkeypatch, capsys) -> None:
    environment, status, says = case.split(" ", 2)
    (root / LIBRARY).touch()
    version = 'if [ "$1" = --version ]; then echo "{0} (GCC) {1}"; elif [ "$1" = -dumpfullversion ]; then echo {1}; '
    script(tmp_path / "old", version.format("old", "8.5.0") + "fi")
    script(tmp_path / "broken", version.format("new", "14.1") + "else echo Killed signal; exit 1; fi")
    monkeypatch.setenv("PATH", "none")
    for name, value in (setting.split("=") for setting in environment.split(",")):
        monkeypatch.setenv(name, str(tmp_path / value) if name == "CXX" else value)
    assert str(native_build.main([])) == status
    printed = capsys.readouterr()
    assert re.search(says, printed.err if status == "2" else printed.out)
    assert ((root / LIBRARY).exists(), (root / "build").exists()) == (status == "2", status != "2")


@needs_compiler
def test_kernels_are_for_this_processor_unless_others_are_asked_for(monkeypatch) -> None:
    """As the compiler knows it; where it does not, for all. A wheel and a build with sanitizers are for all."""
    for listed in ("all", "here"):
        assert native_build.instruction_sets(HostCompiler(("false",), "14.1"), listed) == VARIANTS
    assert "FASTWEIGHTS_BUILD_ISA=all .venv/bin/python -m build" in (ROOT / "Makefile").read_text()
    names = [Nvcc("nvcc", version, Path(), (90,)).machine_code("90") for version in ("11.8", "12.0")]
    assert names == ["sm_90", "sm_90a"]
    if native_toolchain.is_x86() and libraries.why_not("cpu", THIS_TORCH) is None:
        [here] = native_build.instruction_sets(HostCompiler.find(), "here")
        assert here == backends.cpu_instruction_set() or os.environ.get("FASTWEIGHTS_CPU_ISA")
    monkeypatch.setenv("FASTWEIGHTS_BUILD_ISA", "baseline")
    for sanitize, names in ((True, VARIANTS), (False, ["baseline"])):
        plan = native_build.plan_cpu(Torch.find(), sanitize)
        titles = [work.title for work in plan.compilations if work.source.stem == "kernels"]
        assert titles == [f"kernels, {name}, {numbers}" for name in names for numbers in ("float32", "float64")]


def test_a_second_build_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        wait_for(first, "nobody")
        # The first build ends as soon as the second has said that it waits.
        say = Mock(side_effect=lambda *_, **__: fcntl.flock(first, fcntl.LOCK_UN))
        monkeypatch.setattr("builtins.print", say)
        wait_for(second, "the first")
    say.assert_called_once()


NVCC = """[ "$1" != --version ] || echo "Cuda compilation tools, release 13.0, V13.0.88"
[ "$1" != --list-gpu-arch ] || printf 'compute_%s\\n' 75 80 90 100 103 120"""


# torch's version of CUDA, the list, the GPUs, and the architectures or the message.
CUDA = [
    # This nvcc has no names for some, and the last is of a later kind.
    ("13.0", "", [80, 86, 89, 121, 130], "^sm_80 sm_120 compute_120$"),
    ("13.0", "8.0;9.0a+PTX", [75], "^sm_80 sm_90a compute_90a$"),
    # For a GPU of 9.0 with instructions that others lack; where a list has 9.0, without.
    ("13.0", "9.0+PTX", [90], "^sm_90 compute_90$"),
    ("13.0", "", [90], "^sm_90a$"),
    ("13.0", "", [], "no GPU here .* FASTWEIGHTS_BUILD=cuda TORCH_CUDA_ARCH_LIST='8.0;9.0'"),
    ("13.0", "", [90, 70], "compiles for 7.5, 8.0, .* GPU here is of 7.0; let CUDA_HOME name an older"),
    *(("13.0", x, [90], "names .* some of 7.5, 8.0, 9.0, 10.0, 10.3, 12.0") for x in ("Hopper", "8.0;7.0", "90")),
    (None, "9.0", [], r"torch 2\..* has no CUDA"),
    ("12.6", "9.0", [], r"CUDA 13\.0 and torch is for CUDA 12\.6; let CUDA_HOME name a CUDA 12 "),
    ("13.0", "9.0", [], r"no nvcc .* install the CUDA toolkit 13 \(torch is for CUDA 13\.0\)"),
]


@pytest.mark.parametrize("case", CUDA)
def test_cuda_kernels_are_for_the_gpus_here_or_the_problem_is_named(case: tuple, root, tmp_path, monkeypatch) -> None:
    cuda, listed, gpus, found = case
    if "no nvcc" not in found:
        script(tmp_path / "cuda/bin/nvcc", NVCC)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(HostCompiler, "find", lambda: HostCompiler(("g++",), "14.1"))
    monkeypatch.setattr(Torch, "capabilities", lambda self: gpus)
    monkeypatch.setattr(native_toolchain, "DEFAULT_NVCC", str(tmp_path / "default/bin/nvcc"))
    try:
        said = " ".join(native_build.plan_cuda(replace(Torch.find(), cuda=cuda), listed).facts["architectures"])
    except Unavailable as reason:
        said = str(reason)
    assert re.search(found, said), said


@needs_compiler
@pytest.mark.skipif(os.environ.get("FASTWEIGHTS_BUILD") == "none", reason="FASTWEIGHTS_BUILD is none")
def test_the_kernels_of_this_checkout_are_built() -> None:
    """Else the tests of the native backend would test nothing: `make test` builds them first."""
    assert libraries.why_not("cpu", THIS_TORCH) is None
