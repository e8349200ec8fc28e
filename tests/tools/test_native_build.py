"""The kernels are built from what changed, refused where they do not fit, and never in the way where they cannot be."""

import ctypes
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import native_build
import native_toolchain
import pytest
import torch
from lock_file import wait_for
from native_toolchain import Nvcc, Torch, Unavailable

from fairseq_fastweights.ops import libraries as real_libraries
from fairseq_fastweights.ops import native

ROOT = Path(__file__).resolve().parents[2]
THIS_TORCH = str(torch.__version__)

VARIANTS = ["baseline", "avx2", "avx512"] if native_toolchain.is_x86() else ["baseline"]
# A library without torch's headers, which take seconds to compile.
VISIBLE = 'extern "C" __attribute__((visibility("default")))'
SOURCES = {
    "kernels.h": "".join(f"namespace {name} {{ int float32(), float64(); }}\n" for name in VARIANTS),
    "kernels.cpp": '#include "kernels.h"\nint FAST_WEIGHTS_ISA::FAST_WEIGHTS_NUMBERS() { return 1; }\n',
    "dispatch.cpp": '#include "kernels.h"\n'
    + "".join(
        f"#ifdef FAST_WEIGHTS_HAVE_{name.upper()}\n"
        f"int of_{name}() {{ return {name}::float32() + {name}::float64(); }}\n"
        f"#else\nint of_{name}() {{ return 0; }}\n#endif\n"
        for name in VARIANTS
    )
    + f'{VISIBLE} const char* fast_weights_instruction_sets() {{ return "baseline"; }}\n',
    "binding.cpp": "".join(f"int of_{name}();\n" for name in VARIANTS)
    + f"{VISIBLE} int answer() {{ return 40 + {' + '.join(f'of_{name}()' for name in VARIANTS)}; }}\n",
}
LIBRARY, RECORD, LOG = (f"fairseq_fastweights/_native_{name}" for name in ("cpu.so", "build.json", "cpu.log"))

has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
needs_compiler = pytest.mark.skipif(not has_compiler, reason="there is no C++ compiler here")


def libraries_of(root: Path) -> ModuleType:
    """The package's module for loading, in another checkout, with nothing loaded yet."""
    spec = importlib.util.spec_from_file_location("libraries_of_a_test", root / "fairseq_fastweights/ops/libraries.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with small sources; what is built is built in it."""
    for (
        name
    ) in "FASTWEIGHTS_BUILD FASTWEIGHTS_BUILD_ISA FASTWEIGHTS_NATIVE_CPU CXX MAX_JOBS TORCH_CUDA_ARCH_LIST".split():
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("fairseq_fastweights/ops", "cpu"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / "fairseq_fastweights/ops/libraries.py", root / "fairseq_fastweights/ops")
    for name, text in SOURCES.items():
        (root / "cpu" / name).write_text(text)
    monkeypatch.setattr(native_build, "ROOT", root)
    monkeypatch.setattr(native_build, "LIBRARIES", libraries_of(root))
    return root


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def recorded(root: Path) -> dict[str, dict[str, object]]:
    return json.loads((root / RECORD).read_text())


@needs_compiler
def test_changes_are_built_and_an_interrupted_build_is_not_taken_as_whole(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    told = re.findall(r"^CPU kernels: (\d) of (\d): .+ \(\d+ s, \d+ s in all\)$", capsys.readouterr().out, re.MULTILINE)
    assert told == [(str(number + 1), str(files)) for number in range(files)]
    assert ctypes.CDLL(str(root / LIBRARY)).answer() == 40 + 2 * len(VARIANTS)
    entry = recorded(root)["cpu"]
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
        assert "did not finish" in libraries_of(root).load("cpu")
        interrupted = False
        assert native_build.main([]) == 0 and libraries_of(root).load("cpu") is None


@needs_compiler
def test_kernels_for_another_processor_are_refused_in_one_line(root: Path) -> None:
    """As in a folder that machines share: none is run that this processor does not have."""
    dispatch = root / "cpu/dispatch.cpp"
    dispatch.write_text(SOURCES["dispatch.cpp"].replace('return "baseline"', 'return ""'))
    assert native_build.main([]) == 0
    reason = libraries_of(root).load("cpu")
    assert "which this processor does not have; build them with" in reason and "\n" not in reason


@needs_compiler
def test_a_build_that_fails_leaves_a_line_and_a_log_until_it_is_mended(root: Path, monkeypatch, capsys) -> None:
    log, binding = root / LOG, root / "cpu/binding.cpp"
    binding.write_text("int answer() { return no_such_thing; }\n")
    assert native_build.main([]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CPU kernels: not built"))
    for told in (line, libraries_of(root).load("cpu")):
        assert "no_such_thing" in told and str(log) in told and "build again" in told and "\n" not in told
    assert "no_such_thing" in log.read_text() and not list(root.glob(f"{LIBRARY}*"))
    # A build that compiles nothing does not show what an earlier one said.
    monkeypatch.setenv("FASTWEIGHTS_BUILD", "none")
    assert native_build.main([]) == 0 and not log.exists()
    monkeypatch.delenv("FASTWEIGHTS_BUILD")
    binding.write_text(SOURCES["binding.cpp"])
    assert native_build.main([]) == 0 and libraries_of(root).load("cpu") is None


@pytest.mark.parametrize(
    ("environment", "status", "says"),
    [
        ({}, 0, r"CPU kernels: not built: .*no C\+\+ compiler.*apt install g\+\+"),
        ({"CXX": "{old}"}, 0, r"CPU .*old is old \(GCC\) 8.5.0; name g\+\+ 9 or later"),
        ({"CXX": "{broken}"}, 0, r"CPU .*broken failed \(Killed signal\); let MAX_JOBS be 1"),
        ({"FASTWEIGHTS_BUILD": "none"}, 0, "(?s)CPU .*FASTWEIGHTS_BUILD was none.*CUDA .*FASTWEIGHTS_BUILD was none"),
        ({"FASTWEIGHTS_BUILD": "cuda"}, 1, r"CPU .*no C\+\+ compiler"),
        ({"FASTWEIGHTS_BUILD": "gpu"}, 2, "error: .*'gpu'"),
        ({"CXX": "{broken}", "FASTWEIGHTS_BUILD_ISA": "avx3"}, 0, "CPU .*'avx3'; let it be here, all, or some of base"),
    ],
)
def test_without_a_compiler_only_what_was_asked_for_is_an_error(
    root: Path, environment: dict[str, str], status: int, says: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    (root / LIBRARY).touch()
    version = 'if [ "$1" = --version ]; then echo "{0} (GCC) {1}"; elif [ "$1" = -dumpfullversion ]; then echo {1}; '
    old = script(tmp_path / "old", version.format("old", "8.5.0") + "fi")
    broken = script(tmp_path / "broken", version.format("new", "14.1") + "else echo Killed signal; exit 1; fi")
    for name, value in {"PATH": str(tmp_path / "empty"), **environment}.items():
        monkeypatch.setenv(name, value.format(old=old, broken=broken))
    assert native_build.main([]) == status
    printed = capsys.readouterr()
    assert re.search(says, printed.err if status == 2 else printed.out)
    assert ((root / LIBRARY).exists(), (root / "build").exists()) == (status == 2, status != 2)


@needs_compiler
def test_kernels_are_for_this_processor_unless_others_are_asked_for(monkeypatch) -> None:
    """As the compiler knows it; where it does not, for all. A wheel and a build with sanitizers are for all."""
    compiler, unknowing = native_toolchain.HostCompiler.find(), native_toolchain.HostCompiler(("false",), "14.1")
    assert (
        native_build.instruction_sets(compiler, "all") == native_build.instruction_sets(unknowing, "here") == VARIANTS
    )
    assert "FASTWEIGHTS_BUILD_ISA=all .venv/bin/python -m build" in (ROOT / "Makefile").read_text()
    if native_toolchain.is_x86() and real_libraries.why_not("cpu", THIS_TORCH) is None:
        [here] = native_build.instruction_sets(compiler, "here")
        assert here == native.cpu_instruction_set() or os.environ.get("FASTWEIGHTS_CPU_ISA")
    monkeypatch.setenv("FASTWEIGHTS_BUILD_ISA", "baseline")
    for sanitize, names in ((True, VARIANTS), (False, ["baseline"])):
        plan = native_build.plan_cpu(Torch.find(), sanitize)
        titles = [work.title for work in plan.compilations if work.source.stem == "kernels"]
        assert titles == [f"kernels, {name}, {numbers}" for name in names for numbers in ("float32", "float64")]


def test_a_second_build_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        wait_for(first, "nobody")
        said: list[str] = []
        # The first build ends as soon as the second has said that it waits.
        monkeypatch.setattr(
            "builtins.print", lambda text, flush: said.append(text) or fcntl.flock(first, fcntl.LOCK_UN)
        )
        wait_for(second, "the first")
    assert said == ["waiting for the first to end ..."]


@pytest.mark.parametrize(
    ("gone", "facts", "says"),
    [
        ((RECORD, LIBRARY), {}, ["python {root}/tools/native_build.py"]),  # a bare clone
        ((RECORD, "tools"), {}, ["pip install"]),  # an installed package
        ((), {"torch": f"{THIS_TORCH}other"}, [f"torch {THIS_TORCH}other ", f"{THIS_TORCH};", "native_build.py"]),
        ((), {"oldest torch": "2.1000"}, ["for torch 2.1000 and later", f"{THIS_TORCH};", "native_build.py"]),
        ((), {"oldest torch": "2.9", "torch": "2.9.1"}, ["OSError"]),  # it would be loaded
        ((), {"sources": "others"}, ["outdated", "native_build.py"]),
        (("tools", "cpu"), {"sources": "others"}, ["could not be loaded"]),  # they do not matter where there are none
        ((LIBRARY,), {}, ["_native_cpu.so is gone"]),
        ((), {"state": 3}, ["were not built"]),
    ],
)
def test_a_library_is_loaded_into_its_torch_or_refused_in_one_line(
    root: Path, gone: tuple[str, ...], facts: dict[str, object], says: list[str]
) -> None:
    (root / LIBRARY).write_bytes(b"no library")
    entry = {"state": "built", "torch": THIS_TORCH, "sources": real_libraries.source_digest(root, "cpu"), **facts}
    (root / RECORD).write_text(json.dumps({"cpu": entry}))
    for name in gone:
        (shutil.rmtree if (root / name).is_dir() else os.unlink)(root / name)
    libraries = libraries_of(root)
    reason = libraries.load("cpu")
    assert "\n" not in reason and all(text.format(root=root) in reason for text in says)
    (root / RECORD).unlink(missing_ok=True)
    assert libraries.load("cpu") == reason


@pytest.fixture
def nvcc(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of nvcc, for the CUDA part."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    (root / "cuda").mkdir()
    (root / "cuda/kernel.cu").write_text("__global__ void kernel() {}\n")
    return script(
        tmp_path / "cuda/bin/nvcc",
        f"""case "$1" in
        --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
        --list-gpu-arch) cat {tmp_path}/architectures || printf 'compute_%s\\n' 75 80 90 100 103 120 ;;
        esac 2>/dev/null""",
    )


@pytest.mark.parametrize(
    ("cuda", "says"),
    [
        (None, r"2\.13\.0 has no CUDA"),
        ("12.6", r"CUDA 13\.0 and torch is for CUDA 12\.6; let CUDA_HOME name a CUDA 12 "),
        ("13.0", r"no nvcc .* install the CUDA toolkit 13 \(torch is for CUDA 13\.0\)"),
        ("", r"torch is 2.3.1\+cpu; install 2.6 or later"),
    ],
)
def test_what_the_cuda_part_misses_is_named(nvcc: Path, cuda, says, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(native_toolchain, "DEFAULT_NVCC", str(tmp_path / "default/bin/nvcc"))
    if "no nvcc" in says:
        nvcc.unlink()
    (tmp_path / "version.py").write_text("__version__ = '2.3.1+cpu'\ncuda = None\n")
    old = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    with monkeypatch.context() as patch, pytest.raises(Unavailable, match=says):
        patch.setattr(native_toolchain.importlib.util, "find_spec", lambda name: old)
        native_build.plan_cuda(Torch.find() if cuda == "" else Torch(Path("torch"), "2.13.0", cuda), "9.0")


@pytest.mark.parametrize(
    ("listed", "gpus", "found"),
    [
        # This nvcc has no names for some, and the last is of a later kind.
        ("", [80, 86, 89, 121, 130], "sm_80 sm_120 compute_120"),
        ("8.0;9.0a+PTX", [75], "sm_80 sm_90a compute_90a"),
        # For a GPU of 9.0, with what others lack; where a list has 9.0, without.
        ("9.0+PTX", [90], "sm_90 compute_90"),
        ("", [90], "sm_90a"),
        ("", [], "no GPU here .* FASTWEIGHTS_BUILD=cuda TORCH_CUDA_ARCH_LIST='8.0;9.0'"),
        ("", [90, 70], "compiles for 7.5, 8.0, .* GPU here is of 7.0; let CUDA_HOME name an older"),
        *[(listed, [90], "names .* some of 7.5, 8.0, 9.0, 10.0, 10.3, 12.0") for listed in ("Hopper", "8.0;7.0", "90")],
    ],
)
def test_architectures(nvcc: Path, listed: str, gpus: list[int], found: str, monkeypatch) -> None:
    monkeypatch.setattr(Torch, "capabilities", lambda self: gpus)
    here, torch_13 = Nvcc.find("13.0"), Torch(Path("torch"), "2.11.0+cu130", "13.0")
    if found.startswith("sm_"):
        assert here.architectures(torch_13, listed) == found.split()
    else:
        with pytest.raises(Unavailable, match=found):
            here.architectures(torch_13, listed)


def test_machine_code_for_9_0_is_what_nvcc_knows() -> None:
    names = [Nvcc("nvcc", version, Path(), (90,)).machine_code("90") for version in ("11.8", "12.0", "13.0")]
    assert names == ["sm_90", "sm_90a", "sm_90a"]


@pytest.fixture
def project(root: Path) -> Path:
    """With what an installation needs besides; the package holds a library that is of another environment."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    for name in ("__init__.py", "ops/__init__.py", "_native_cuda.so"):
        (root / "fairseq_fastweights" / name).touch()
    return root


def setup(project: Path, *arguments: str, **environment: str) -> None:
    command = [sys.executable, "setup.py", "-q", *arguments]
    subprocess.run(command, cwd=project, env=os.environ | environment, capture_output=True, check=True)


@needs_compiler
@pytest.mark.slow
def test_installing_builds_against_the_torch_that_pip_hides(project: Path, tmp_path: Path) -> None:
    """As pip does it: a PYTHONPATH with what the build needs, and a start that hides all else."""
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    packages = Path(sysconfig.get_path("purelib"))
    for name in ("setuptools", "pkg_resources", "_distutils_hack"):
        if (packages / name).exists():
            (overlay / name).symlink_to(packages / name)
    hide = f"import sys\nsys.path = [path for path in sys.path if path != {str(packages)!r}]\n"
    (overlay / "sitecustomize.py").write_text(hide)
    isolated = {"PYTHONPATH": str(overlay)}
    assert subprocess.run([sys.executable, "-c", "import torch"], env=os.environ | isolated).returncode
    setup(project, "build", "--build-lib", str(tmp_path / "lib"), **isolated)
    found = {path.name for path in tmp_path.glob("lib/fairseq_fastweights/_native_*")}
    assert found == {"_native_build.json", "_native_cpu.so"}
    entry = recorded(tmp_path / "lib")["cpu"]
    assert entry["state"] == "built" and entry["torch"] == THIS_TORCH


def test_a_source_distribution_can_be_built_from(project: Path, tmp_path: Path) -> None:
    """fairseq too: what tools/build_fairseq.py imports and the constraints that it takes are among the sources."""
    setup(project, "sdist", "-d", str(tmp_path))
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"cpu/{name}" for name in SOURCES} | {"constraints.txt", "fairseq_fastweights/ops/libraries.py"} <= names
    assert {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} <= names
    assert not [name for name in names if "_native_" in name or name.endswith(".pyc")]


@needs_compiler
def test_the_kernels_of_this_checkout_are_built() -> None:
    """Else the tests of the native backend would test nothing: `make test` builds them first."""
    if os.environ.get("FASTWEIGHTS_BUILD") == "none":
        pytest.skip("FASTWEIGHTS_BUILD is none")
    assert real_libraries.why_not("cpu", THIS_TORCH) is None
