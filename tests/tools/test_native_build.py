"""The kernels are built from what changed, refused where they do not fit, and never in the way where they cannot be."""

import ctypes
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
from native_toolchain import Nvcc, Torch, Unavailable

from fairseq_fastweights.ops import libraries as real_libraries

ROOT = Path(__file__).resolve().parents[2]
THIS_TORCH = str(torch.__version__)

VARIANTS = ["baseline", "avx2", "avx512"] if native_toolchain.is_x86() else ["baseline"]
# A library without torch's headers, which take seconds to compile.
SOURCES = {
    "kernels.h": "#pragma once\nint variants();\n",
    "kernels.cpp": '#include "kernels.h"\nnamespace FAST_WEIGHTS_ISA { int one() { return 1; } }\n',
    "binding.cpp": '#include "kernels.h"\n'
    'extern "C" __attribute__((visibility("default"))) int answer() { return 40 + variants(); }\n',
    "dispatch.cpp": "".join(f"namespace {name} {{ int one(); }}\n" for name in VARIANTS)
    + f"int variants() {{ return {' + '.join(f'{name}::one()' for name in VARIANTS)}; }}\n",
}
COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
LIBRARY, RECORD, LOG = (f"fairseq_fastweights/_native_{name}" for name in ("cpu.so", "build.json", "cpu.log"))

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")


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
    for name in ("FASTWEIGHTS_BUILD", "FASTWEIGHTS_NATIVE_CPU", "CXX", "MAX_JOBS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "checkout"
    for path in ("fairseq_fastweights/ops/libraries.py", "tools/native_build.py", "tools/native_toolchain.py"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, root / path)
    (root / "cpu").mkdir()
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
@pytest.mark.parametrize(
    ("source", "compiled"), [("binding.cpp", 1), ("kernels.cpp", len(VARIANTS)), ("kernels.h", len(VARIANTS) + 2)]
)
def test_what_changed_is_built_recorded_and_loads_and_an_interrupted_build_is_not_taken_for_the_one_before(
    root: Path, source: str, compiled: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    made: list[str] = []
    whole = native_build.run

    def run(command: list[str], target: Path, log: Path) -> None:
        """It is interrupted where something was changed, and links."""
        made.append(target.suffix)
        if changed and target.suffix == ".so":
            raise KeyboardInterrupt
        whole(command, target, log)

    changed = False
    monkeypatch.setattr(native_build, "run", run)
    assert native_build.main([]) == 0
    assert "CPU kernels: ready" in capsys.readouterr().out
    assert ctypes.CDLL(str(root / LIBRARY)).answer() == 40 + len(VARIANTS)
    entry = recorded(root)["cpu"]
    assert entry["state"] == "built" and entry["torch"] == THIS_TORCH and entry["variants"] == VARIANTS
    assert entry["sources"] == real_libraries.source_digest(root / "cpu")
    assert re.search(r"\d+\.\d+", str(entry["compiler"])) and "-O3" in str(entry["flags"])
    assert "march=native" not in str(entry["flags"])
    made.clear()
    assert native_build.main([]) == 0 and not made
    with (root / "cpu" / source).open("a") as file:
        file.write("// changed\n")
    changed = True
    with pytest.raises(KeyboardInterrupt):
        native_build.main([])
    assert made.count(".o") == compiled and made.count(".so") == 1
    assert "did not finish" in libraries_of(root).load("cpu")
    changed = False
    assert native_build.main([]) == 0 and libraries_of(root).load("cpu") is None


@needs_compiler
@pytest.mark.parametrize(
    ("dispatch", "says"),
    [
        ("int variants() { return no_such_thing; }\n", "no_such_thing"),
        ("int somewhere_else();\nint variants() { return somewhere_else(); }\n", "somewhere_else"),
        (None, "x.cpp:1: error: boom"),  # while others wait
    ],
)
def test_a_build_that_fails_leaves_a_line_and_a_log_until_it_is_mended(
    root: Path, dispatch: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if "somewhere" in says and sys.platform != "linux":
        pytest.skip("another linker takes what is undefined")
    native_build.main([])
    capsys.readouterr()
    log = root / LOG
    if dispatch is None:
        answers = f'*" --version "*|*" -dumpfullversion "*|*" -fsyntax-only "*) exec {COMPILER} "$@" ;;'
        failing = f'case " $* " in\n{answers}\nesac\nsleep 0.3; echo "{says}"; exit 1'
        monkeypatch.setenv("CXX", str(script(tmp_path / "failing-c++", failing)))
        monkeypatch.setenv("MAX_JOBS", "1")
    else:
        (root / "cpu/dispatch.cpp").write_text(dispatch)
    assert native_build.main([]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CPU kernels: not built"))
    reason = libraries_of(root).load("cpu")
    for text in (line, reason):
        assert says in text and str(log) in text and "build again" in text and "\n" not in text
    assert says in log.read_text() and log.read_text().count("boom\n") < len(VARIANTS) + 2
    assert recorded(root)["cpu"]["state"] == "missing" and not list(root.glob(f"{LIBRARY}*"))
    # A build that compiles nothing does not show what an earlier one said.
    monkeypatch.setenv("FASTWEIGHTS_BUILD", "none")
    assert native_build.main([]) == 0 and not log.exists()
    assert log.name not in capsys.readouterr().out and log.name not in libraries_of(root).load("cpu")
    for name in ("CXX", "FASTWEIGHTS_BUILD"):
        monkeypatch.delenv(name, raising=False)
    (root / "cpu/dispatch.cpp").write_text(SOURCES["dispatch.cpp"])
    assert native_build.main([]) == 0 and not log.exists()
    assert libraries_of(root).load("cpu") is None


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("#error -- unsupported GNU version! gcc versions later than 15", "name an older one with CXX="),
        ("c++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS=1"),
        ("ld: cannot find -lc10", "install what it misses"),
    ],
)
def test_the_likely_remedy_is_named(root: Path, said: str, remedy: str, tmp_path: Path) -> None:
    failing = script(tmp_path / "compiler", f"echo '{said}'; exit 1")
    with pytest.raises(Unavailable, match=f"{remedy}.* ?build again|build again.*{remedy}"):
        native_build.run([str(failing)], tmp_path / "x.o", tmp_path / "log")


@pytest.mark.parametrize(
    ("environment", "status", "says"),
    [
        ({}, 0, r"CPU kernels: not built: .*no C\+\+ compiler.*apt install g\+\+"),
        ({"CXX": "no-such-c++"}, 0, r"CPU .*no-such-c\+\+"),
        ({"CXX": "{old}"}, 0, r"CPU .*old is old \(GCC\) 8.5.0; install g\+\+ 9 or later"),
        ({"FASTWEIGHTS_BUILD": "none"}, 0, "(?s)CPU .*FASTWEIGHTS_BUILD was none.*CUDA .*FASTWEIGHTS_BUILD was none"),
        ({"FASTWEIGHTS_BUILD": "cpu"}, 1, r"CPU .*no C\+\+ compiler"),
        ({"FASTWEIGHTS_BUILD": "cuda"}, 1, r"CPU .*no C\+\+ compiler"),
        ({"FASTWEIGHTS_BUILD": "gpu"}, 2, "error: .*'gpu'"),
    ],
)
def test_without_a_compiler_only_what_was_asked_for_is_an_error(
    root: Path, environment: dict[str, str], status: int, says: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    (root / LIBRARY).touch()
    old = script(tmp_path / "old", 'if [ "$1" = --version ]; then echo "old (GCC) 8.5.0"; else echo 8.5.0; fi')
    for name, value in {"PATH": str(tmp_path / "empty"), **environment}.items():
        monkeypatch.setenv(name, value.format(old=old))
    assert native_build.main([]) == status
    printed = capsys.readouterr()
    assert re.search(says, printed.err if status == 2 else printed.out)
    assert ((root / LIBRARY).exists(), (root / "build").exists()) == (status == 2, status != 2)
    for line in printed.out.splitlines():
        part, _, reason = line.partition(" kernels: not built: ")
        assert reason and reason in libraries_of(root).load(part.lower())


def test_a_torch_that_is_missing_or_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.3.1+cpu'\ncuda = None\n")
    old = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    for found, says in ((None, "saw no torch; install torch and"), (old, r"torch is 2.3.1\+cpu; install 2.6 or later")):
        monkeypatch.setattr(native_toolchain.importlib.util, "find_spec", lambda name, found=found: found)
        with pytest.raises(Unavailable, match=says):
            Torch.find()


OTHER = THIS_TORCH.partition("+")[0] + "+other"


@pytest.mark.parametrize(
    ("gone", "facts", "says"),
    [
        ((RECORD, LIBRARY), {}, ["python {root}/tools/native_build.py"]),  # a bare clone
        ((RECORD, "tools"), {}, ["pip install"]),  # an installed package
        ((), {"torch": "2.4.1"}, ["torch 2.4.1 ", THIS_TORCH, "native_build.py"]),
        ((), {"torch": OTHER}, [f"torch {OTHER} ", THIS_TORCH, "native_build.py"]),
        ((), {"sources": "others"}, ["outdated", "native_build.py"]),
        (("tools", "cpu"), {"sources": "others"}, ["could not be loaded"]),  # they do not matter where there are none
        ((LIBRARY,), {}, ["_native_cpu.so is gone"]),
        ((), {}, ["OSError", "_native_cpu.so", "native_build.py"]),  # the loader's own error
        ((), {"state": 3}, ["were not built"]),
    ],
)
def test_a_library_is_loaded_into_the_torch_that_it_was_built_for_or_refused_in_one_line_that_does_not_change(
    root: Path, gone: tuple[str, ...], facts: dict[str, object], says: list[str]
) -> None:
    (root / LIBRARY).write_bytes(b"no library")
    entry = {"state": "built", "torch": THIS_TORCH, "sources": real_libraries.source_digest(root / "cpu"), **facts}
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
        'case "$1" in\n'
        '--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;\n'
        '--dryrun) echo "#$ TOP=/opt/the-toolkit" >&2 ;;\n'
        f"--list-gpu-arch) cat {tmp_path}/architectures 2>/dev/null || printf 'compute_%s\\n' 75 80 90 100 103 120 ;;\n"
        "*) exit 1 ;;\n"
        "esac",
    )


@pytest.mark.parametrize(
    ("cuda", "there", "says"),
    [
        (None, True, r"2\.13\.0 has no CUDA"),
        ("12.6", True, r"CUDA 13\.0 and torch is for CUDA 12\.6; let CUDA_HOME name a CUDA 12 "),
        ("13.0", False, r"no nvcc .* install the CUDA toolkit 13 \(torch is for CUDA 13\.0\)"),
    ],
)
def test_what_the_cuda_part_misses_is_named(nvcc: Path, cuda, there, says, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(native_toolchain, "DEFAULT_NVCC", str(tmp_path / "default/bin/nvcc"))
    if not there:
        nvcc.unlink()
    with pytest.raises(Unavailable, match=says):
        native_build.plan_cuda(Torch(Path("torch"), "2.13.0", cuda))


@pytest.mark.parametrize(
    ("listed", "gpus", "architectures"),
    [
        ("", [], "sm_75 sm_80 sm_90 sm_100 sm_120 compute_120"),
        ("", [80, 90], "sm_80 sm_90"),
        ("", [70], "sm_75 sm_80 sm_90 sm_100 sm_120 compute_120"),  # one that this nvcc knows nothing of
        ("8.0;9.0a+PTX", [90], "sm_80 sm_90a compute_90a"),
        ("7.5 12.0", [], "sm_75 sm_120"),
        *[(listed, [], None) for listed in ("Hopper", "8.0;7.0", "90")],
    ],
)
def test_architectures(nvcc: Path, listed: str, gpus, architectures: str | None, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    monkeypatch.setattr(Torch, "capabilities", lambda self: gpus)
    torch_13 = Torch(Path("torch"), "2.11.0+cu130", "13.0")
    if architectures is None:
        with pytest.raises(Unavailable, match=r"TORCH_CUDA_ARCH_LIST names .*7.5, 8.0, 9.0, 10.0, 10.3, 12.0"):
            Nvcc.find("13.0").architectures(torch_13)
        return
    assert Nvcc.find("13.0").architectures(torch_13) == architectures.split()
    if not listed and not gpus:  # an older nvcc
        (tmp_path / "architectures").write_text("compute_70\ncompute_90\n")
        assert Nvcc.find("13.0").architectures(torch_13) == ["sm_70", "sm_90", "compute_90"]


@pytest.fixture
def project(root: Path) -> Path:
    """With what an installation needs besides; the package holds a library that is of another environment."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, root / name)
    for name in ("__init__.py", "ops/__init__.py", "_native_cuda.so"):
        (root / "fairseq_fastweights" / name).touch()
    return root


def setup(project: Path, *arguments: str, **environment: str) -> None:
    command = [sys.executable, "setup.py", "-q", *arguments]
    result = subprocess.run(command, cwd=project, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@needs_compiler
@pytest.mark.slow
def test_installing_builds_against_the_torch_that_is_there(project: Path, tmp_path: Path) -> None:
    # As pip does it: a PYTHONPATH with what the build needs, and a start that hides all else.
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
    for number, environment in enumerate((isolated, {})):
        lib = tmp_path / str(number)
        setup(project, "build", "--build-lib", str(lib), **environment)
        found = {path.name for path in lib.glob("fairseq_fastweights/_native_*")}
        assert found == {"_native_build.json", "_native_cpu.so"}
        assert recorded(lib)["cpu"]["state"] == "built" and recorded(lib)["cpu"]["torch"] == THIS_TORCH


def test_a_source_distribution_can_be_built_from(project: Path, tmp_path: Path) -> None:
    setup(project, "sdist", "-d", str(tmp_path))
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"cpu/{name}" for name in SOURCES} <= names
    assert {"tools/native_build.py", "tools/native_toolchain.py", "fairseq_fastweights/ops/libraries.py"} <= names
    assert not [name for name in names if "_native_" in name]


@needs_compiler
def test_the_kernels_of_this_checkout_are_built() -> None:
    """Else the tests of the native backend would test nothing: `make test` builds them first."""
    if os.environ.get("FASTWEIGHTS_BUILD") == "none":
        pytest.skip("FASTWEIGHTS_BUILD is none")
    assert real_libraries.why_not("cpu", THIS_TORCH) is None
