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
from types import ModuleType

import native_build
import native_toolchain
import pytest
import torch
from native_toolchain import Nvcc, Torch, Unavailable

from fairseq_fastweights.ops import libraries as real_libraries

ROOT = Path(__file__).resolve().parents[2]
THIS_TORCH = str(torch.__version__)

# Libraries without torch's headers, which take seconds to compile.
SOURCES = {
    "kernels.h": "#pragma once\nint variants();\n",
    "kernels.cpp": '#include "kernels.h"\nnamespace FAST_WEIGHTS_ISA { int one() { return 1; } }\n',
    "binding.cpp": '#include "kernels.h"\n'
    'extern "C" __attribute__((visibility("default"))) int answer() { return 40 + variants(); }\n',
    "dispatch.cpp": """#include "kernels.h"
namespace baseline { int one(); }
#ifdef FAST_WEIGHTS_HAVE_X86_VARIANTS
namespace avx2 { int one(); }
namespace avx512 { int one(); }
int variants() { return baseline::one() + avx2::one() + avx512::one(); }
#else
int variants() { return baseline::one(); }
#endif
""",
}
VARIANTS = ["baseline", "avx2", "avx512"] if native_toolchain.is_x86() else ["baseline"]

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler here"
)


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


@pytest.fixture
def failing_compiler(tmp_path: Path) -> Path:
    """One that answers questions, and takes a while to compile nothing."""
    compiler = next(filter(shutil.which, ("c++", "g++", "clang++")))
    script = tmp_path / "failing-c++"
    script.write_text(
        "#!/bin/sh\n"
        'case " $* " in\n'
        f'*" --version "*|*" -dumpfullversion "*|*" -fsyntax-only "*) exec {compiler} "$@" ;;\n'
        "esac\n"
        'sleep 1; echo "x.cpp:1: error: boom"; exit 1\n'
    )
    script.chmod(0o755)
    return script


def recorded(root: Path) -> dict[str, dict[str, object]]:
    return json.loads((root / "fairseq_fastweights/_native_build.json").read_text())


def change_record(root: Path, **facts: object) -> None:
    record = recorded(root)
    record["cpu"].update(facts)
    (root / "fairseq_fastweights/_native_build.json").write_text(json.dumps(record))


def answer(root: Path) -> int:
    return ctypes.CDLL(str(root / "fairseq_fastweights/_native_cpu.so")).answer()


@needs_compiler
class TestBuild:
    def test_builds_loads_and_records(self, root: Path, capsys) -> None:
        assert native_build.main([]) == 0
        assert "CPU kernels: ready" in capsys.readouterr().out
        assert answer(root) == 40 + len(VARIANTS)
        entry = recorded(root)["cpu"]
        assert entry["state"] == "built" and entry["torch"] == THIS_TORCH and entry["variants"] == VARIANTS
        assert entry["sources"] == real_libraries.source_digest(root / "cpu")
        assert re.search(r"\d+\.\d+", str(entry["compiler"])) and "-O3" in str(entry["flags"])
        assert "march=native" not in str(entry["flags"])
        assert libraries_of(root).load("cpu") is None

    def test_a_second_build_compiles_nothing(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        native_build.main([])
        before = (root / "fairseq_fastweights/_native_cpu.so").stat().st_mtime_ns
        monkeypatch.setattr(native_build.Builder, "run", lambda *arguments: pytest.fail("it compiled"))
        assert native_build.main([]) == 0
        assert (root / "fairseq_fastweights/_native_cpu.so").stat().st_mtime_ns == before

    @pytest.mark.parametrize(
        ("source", "compiled"),
        [("binding.cpp", 1), ("kernels.cpp", len(VARIANTS)), ("kernels.h", len(VARIANTS) + 2)],
    )
    def test_what_changed_is_compiled(
        self, root: Path, source: str, compiled: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        native_build.main([])
        targets: list[str] = []
        whole = native_build.Builder.run

        def run(self: native_build.Builder, part: str, command: list[str], target: Path) -> None:
            targets.append(target.suffix)
            whole(self, part, command, target)

        monkeypatch.setattr(native_build.Builder, "run", run)
        with (root / "cpu" / source).open("a") as file:
            file.write("// changed\n")
        assert native_build.main([]) == 0
        assert targets.count(".o") == compiled and targets.count(".so") == 1
        assert libraries_of(root).load("cpu") is None

    def test_a_source_that_does_not_compile_leaves_a_line_and_a_log(self, root: Path, capsys) -> None:
        native_build.main([])
        capsys.readouterr()
        (root / "cpu/dispatch.cpp").write_text("int variants() { return no_such_thing; }\n")
        assert native_build.main([]) == 0
        log = root / "fairseq_fastweights/_native_cpu.log"
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CPU kernels: not built"))
        assert "no_such_thing" in line and str(log) in line and "build again" in line
        assert "no_such_thing" in log.read_text()
        reason = libraries_of(root).load("cpu")
        assert "no_such_thing" in reason and str(log) in reason and "\n" not in reason
        assert not (root / "fairseq_fastweights/_native_cpu.so").exists()
        (root / "cpu/dispatch.cpp").write_text(SOURCES["dispatch.cpp"])
        assert native_build.main([]) == 0 and not log.exists()
        assert libraries_of(root).load("cpu") is None

    def test_the_log_is_of_this_build(self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        """One that compiles nothing does not show what an earlier one said."""
        (root / "cpu/dispatch.cpp").write_text("int variants() { return no_such_thing; }\n")
        assert native_build.main([]) == 0
        log = root / "fairseq_fastweights/_native_cpu.log"
        assert log.exists()
        capsys.readouterr()
        monkeypatch.setenv("FASTWEIGHTS_BUILD", "none")
        assert native_build.main([]) == 0
        assert not log.exists()
        assert log.name not in capsys.readouterr().out and log.name not in libraries_of(root).load("cpu")

    def test_a_compiler_that_fails_while_others_wait_leaves_a_line(
        self, root: Path, failing_compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys
    ) -> None:
        monkeypatch.setenv("CXX", str(failing_compiler))
        monkeypatch.setenv("MAX_JOBS", "1")
        assert native_build.main([]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CPU kernels: not built"))
        assert "x.cpp:1: error: boom" in line
        assert recorded(root)["cpu"]["state"] == "missing" and "boom" in libraries_of(root).load("cpu")
        assert (root / "fairseq_fastweights/_native_cpu.log").read_text().count("boom\n") < len(VARIANTS) + 2

    def test_a_library_that_does_not_link_is_not_left_behind(self, root: Path, capsys) -> None:
        if sys.platform != "linux":
            pytest.skip("only Linux's linker is asked to refuse what is undefined")
        (root / "cpu/dispatch.cpp").write_text("int somewhere_else();\nint variants() { return somewhere_else(); }\n")
        assert native_build.main([]) == 0
        assert "somewhere_else" in capsys.readouterr().out
        assert recorded(root)["cpu"]["state"] == "missing"
        assert not list((root / "fairseq_fastweights").glob("_native_cpu.so*"))

    def test_an_interrupted_build_is_not_taken_for_the_one_before(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        native_build.main([])
        with (root / "cpu/binding.cpp").open("a") as file:
            file.write("// changed\n")
        whole = native_build.Builder.run

        def run(self: native_build.Builder, part: str, command: list[str], target: Path) -> None:
            if target.suffix == ".so":
                raise KeyboardInterrupt
            whole(self, part, command, target)

        with monkeypatch.context() as patch:
            patch.setattr(native_build.Builder, "run", run)
            with pytest.raises(KeyboardInterrupt):
                native_build.main([])
        assert "did not finish" in libraries_of(root).load("cpu")
        assert native_build.main([]) == 0
        assert libraries_of(root).load("cpu") is None


class TestWithoutCompiler:
    @pytest.fixture(autouse=True)
    def nothing_on_path(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))

    def test_the_installation_goes_on(self, root: Path, capsys) -> None:
        assert native_build.main([]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CPU"))
        assert "no C++ compiler" in line and "apt install g++" in line
        assert line.partition("not built: ")[2] in libraries_of(root).load("cpu")

    @pytest.mark.parametrize("choice", ["cpu", "cuda"])
    def test_what_was_asked_for_is_an_error(self, root: Path, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FASTWEIGHTS_BUILD", choice)
        assert native_build.main([]) == 1

    def test_the_one_that_is_named_and_missing_is_named(self, root: Path, monkeypatch, capsys) -> None:
        monkeypatch.setenv("CXX", "no-such-c++")
        native_build.main([])
        assert "no-such-c++" in capsys.readouterr().out


class TestChoice:
    def test_none_builds_nothing_and_says_so(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (root / "fairseq_fastweights/_native_cpu.so").touch()
        monkeypatch.setenv("FASTWEIGHTS_BUILD", "none")
        assert native_build.main([]) == 0
        assert not (root / "fairseq_fastweights/_native_cpu.so").exists()
        assert all("FASTWEIGHTS_BUILD was none" in libraries_of(root).load(part) for part in ("cpu", "cuda"))

    def test_another_word_is_an_error(self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.setenv("FASTWEIGHTS_BUILD", "gpu")
        assert native_build.main([]) == 2
        assert "'gpu'" in capsys.readouterr().err and not (root / "build").exists()


class TestLoad:
    """A library is loaded into the torch that it was built for, or not at all."""

    @pytest.fixture
    def built(self, root: Path) -> Path:
        """As a build leaves it, with a library that cannot be loaded."""
        (root / "fairseq_fastweights/_native_cpu.so").write_bytes(b"no library")
        entry = {"state": "built", "torch": THIS_TORCH, "sources": real_libraries.source_digest(root / "cpu")}
        (root / "fairseq_fastweights/_native_build.json").write_text(json.dumps({"cpu": entry}))
        return root

    def refusal(self, root: Path) -> str:
        reason = libraries_of(root).load("cpu")
        assert reason is not None and "\n" not in reason
        return reason

    def test_a_bare_clone_says_how_to_build(self, root: Path) -> None:
        assert f"python {root / 'tools' / 'native_build.py'}" in self.refusal(root)

    def test_an_installed_package_says_how_to_build(self, built: Path) -> None:
        (built / "fairseq_fastweights/_native_build.json").unlink()
        shutil.rmtree(built / "tools")
        assert "pip install" in self.refusal(built)

    @pytest.mark.parametrize("other", ["2.4.1", THIS_TORCH.partition("+")[0] + "+other"])
    def test_another_torch_is_refused_before_loading(self, built: Path, other: str) -> None:
        change_record(built, torch=other)
        reason = self.refusal(built)
        assert f"torch {other} " in reason and THIS_TORCH in reason and "native_build.py" in reason

    def test_changed_sources_are_refused(self, built: Path) -> None:
        with (built / "cpu/kernels.h").open("a") as file:
            file.write("// changed\n")
        assert "outdated" in self.refusal(built) and "native_build.py" in self.refusal(built)

    def test_sources_do_not_matter_where_there_are_none(self, built: Path) -> None:
        shutil.rmtree(built / "tools")
        shutil.rmtree(built / "cpu")
        assert "could not be loaded" in self.refusal(built)

    def test_a_lost_library_is_named(self, built: Path) -> None:
        (built / "fairseq_fastweights/_native_cpu.so").unlink()
        assert "_native_cpu.so is gone" in self.refusal(built)

    def test_the_loaders_error_is_passed_on(self, built: Path) -> None:
        reason = self.refusal(built)
        assert "OSError" in reason and "_native_cpu.so" in reason and "native_build.py" in reason

    @pytest.mark.parametrize("text", ["", "[]", '{"cpu": "built"}', '{"cpu": {"state"'])
    def test_a_record_that_cannot_be_read_is_no_record(self, built: Path, text: str) -> None:
        (built / "fairseq_fastweights/_native_build.json").write_text(text)
        assert "were not built" in self.refusal(built)

    def test_the_answer_does_not_change_later(self, built: Path) -> None:
        libraries = libraries_of(built)
        first = libraries.load("cpu")
        (built / "fairseq_fastweights/_native_build.json").unlink()
        assert libraries.load("cpu") == first

    @needs_compiler
    def test_a_library_can_be_named_instead(self, built: Path, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert native_build.main(["--into", str(tmp_path / "elsewhere")]) == 0
        monkeypatch.setenv("FASTWEIGHTS_NATIVE_CPU", str(tmp_path / "elsewhere/_native_cpu.so"))
        change_record(built, torch="2.4.1")
        assert libraries_of(built).load("cpu") is None


class TestCuda:
    """What the CUDA part needs, with a script in the place of nvcc."""

    TORCH = Torch(Path("torch"), "2.11.0+cu130", "13.0")

    @pytest.fixture
    def nvcc(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        script = tmp_path / "cuda/bin/nvcc"
        script.parent.mkdir(parents=True)
        script.write_text(
            "#!/bin/sh\n"
            'case "$1" in\n'
            '--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;\n'
            '--dryrun) echo "#$ TOP=/opt/the-toolkit" >&2 ;;\n'
            "--list-gpu-arch) echo compute_75; echo compute_80; echo compute_90; echo compute_120 ;;\n"
            "*) exit 1 ;;\n"
            "esac\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        (root / "cuda").mkdir()
        (root / "cuda/kernel.cu").write_text("__global__ void kernel() {}\n")
        return script

    def test_a_torch_without_cuda(self) -> None:
        with pytest.raises(Unavailable, match=r"2\.13\.0\+cpu has no CUDA"):
            native_build.plan_cuda(Torch(Path("torch"), "2.13.0+cpu", None))

    def test_another_major_version(self, nvcc: Path) -> None:
        with pytest.raises(Unavailable, match=r"CUDA 13\.0 and torch is for CUDA 12\.6; let CUDA_HOME name a CUDA 12 "):
            native_build.plan_cuda(Torch(Path("torch"), "2.11.0+cu126", "12.6"))
        assert Nvcc.find("13.2").version == "13.0"

    def test_no_nvcc(self, nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        monkeypatch.setattr(native_toolchain, "DEFAULT_NVCC", str(tmp_path / "default/bin/nvcc"))
        nvcc.unlink()
        with pytest.raises(Unavailable, match=r"no nvcc .* install the CUDA toolkit 13 \(torch is for CUDA 13\.0\)"):
            native_build.plan_cuda(self.TORCH)

    def test_headers_are_where_nvcc_says(self, nvcc: Path) -> None:
        assert Nvcc.find("13.0").include_folder == Path("/opt/the-toolkit/include")

    @pytest.mark.parametrize(
        ("listed", "gpus", "architectures"),
        [
            ("", [], ["sm_75", "sm_80", "sm_90", "compute_90"]),
            ("", [90], ["sm_90"]),
            ("", [80, 90], ["sm_80", "sm_90"]),
            ("", [70], ["sm_75", "sm_80", "sm_90", "compute_90"]),  # one that this nvcc knows nothing of
            ("8.0", [90], ["sm_80"]),
            ("8.0;9.0a+PTX", [], ["sm_80", "sm_90a", "compute_90a"]),
            ("7.5 12.0", [], ["sm_75", "sm_120"]),
        ],
    )
    def test_architectures(self, nvcc: Path, listed: str, gpus: list[int], architectures, monkeypatch) -> None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        monkeypatch.setattr(Torch, "capabilities", lambda self: gpus)
        assert Nvcc.find("13.0").architectures(self.TORCH) == architectures

    @pytest.mark.parametrize("listed", ["Hopper", "8.0;7.0", "90"])
    def test_a_list_that_cannot_be_read(self, nvcc: Path, listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        with pytest.raises(Unavailable, match=r"TORCH_CUDA_ARCH_LIST names .*7.5, 8.0, 9.0, 12.0"):
            Nvcc.find("13.0").architectures(self.TORCH)

    @needs_compiler
    @pytest.mark.parametrize("words", ["{}", "{} -g0", "ccache {}", "ccache {} -g0"])
    def test_the_host_compiler_is_named_without_what_starts_it(
        self, nvcc: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler = next(filter(shutil.which, ("c++", "g++", "clang++")))
        ccache = tmp_path / "bin/ccache"
        ccache.parent.mkdir()
        ccache.write_text('#!/bin/sh\nexec "$@"\n')
        ccache.chmod(0o755)
        monkeypatch.setenv("PATH", f"{ccache.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("CXX", words.format(compiler))
        here = Torch.find()
        plan = native_build.plan_cuda(Torch(here.folder, here.version, "13.0"))
        for command in (plan.compilations[0].command, plan.link):
            assert [word for word in command if word.startswith("-ccbin")] == [f"-ccbin={compiler}"]

    @needs_compiler
    def test_a_failure_leaves_the_cpu_part(self, nvcc: Path, root: Path, monkeypatch, capsys) -> None:
        here = Torch.find()
        monkeypatch.setattr(Torch, "find", lambda: Torch(here.folder, here.version, "13.0"))
        assert native_build.main([]) == 0
        assert recorded(root)["cpu"]["state"] == "built" and recorded(root)["cuda"]["state"] == "missing"
        assert "CUDA kernels: not built: " in capsys.readouterr().out
        monkeypatch.setenv("FASTWEIGHTS_BUILD", "cuda")
        assert native_build.main([]) == 1


class TestInstallation:
    @pytest.fixture
    def project(self, root: Path) -> Path:
        """With what an installation needs besides; the package holds a library that is of another environment."""
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
            shutil.copy(ROOT / name, root / name)
        (root / "fairseq_fastweights/__init__.py").touch()
        (root / "fairseq_fastweights/ops/__init__.py").touch()
        (root / "fairseq_fastweights/_native_cuda.so").touch()
        return root

    def setup(self, project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "setup.py", "-q", *arguments]
        env = {**os.environ, **environment}
        return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)

    @needs_compiler
    @pytest.mark.slow
    @pytest.mark.parametrize("isolated", [True, False])
    def test_builds_against_the_torch_that_is_installed(self, project: Path, isolated: bool, tmp_path: Path) -> None:
        environment = {}
        if isolated:
            # As pip does it: a PYTHONPATH with what the build needs, and a start that hides all else.
            overlay = tmp_path / "overlay"
            overlay.mkdir()
            packages = Path(sysconfig.get_path("purelib"))
            for name in ("setuptools", "pkg_resources", "_distutils_hack"):
                if (packages / name).exists():
                    (overlay / name).symlink_to(packages / name)
            (overlay / "sitecustomize.py").write_text(
                f"import sys\nsys.path = [path for path in sys.path if path != {str(packages)!r}]\n"
            )
            environment = {"PYTHONPATH": str(overlay)}
            hidden = subprocess.run([sys.executable, "-c", "import torch"], env={**os.environ, **environment})
            assert hidden.returncode != 0
        result = self.setup(project, "build", "--build-lib", str(tmp_path / "lib"), **environment)
        assert result.returncode == 0, result.stderr
        built = tmp_path / "lib/fairseq_fastweights"
        assert {path.name for path in built.glob("_native_*")} == {"_native_build.json", "_native_cpu.so"}
        record = json.loads((built / "_native_build.json").read_text())
        assert record["cpu"]["state"] == "built" and record["cpu"]["torch"] == THIS_TORCH

    @pytest.mark.slow
    def test_what_is_asked_for_and_cannot_be_built_fails(self, project: Path, tmp_path: Path) -> None:
        result = self.setup(
            project, "build", "--build-lib", str(tmp_path / "lib"), CXX="no-such-c++", FASTWEIGHTS_BUILD="cpu"
        )
        assert result.returncode != 0 and "no-such-c++" in result.stdout

    @needs_compiler
    @pytest.mark.slow
    def test_a_compiler_that_fails_leaves_an_installation_that_says_so(
        self, project: Path, failing_compiler: Path, tmp_path: Path
    ) -> None:
        environment = {"CXX": str(failing_compiler), "MAX_JOBS": "1"}
        result = self.setup(project, "build", "--build-lib", str(tmp_path / "lib"), **environment)
        assert result.returncode == 0, result.stderr
        assert "CPU kernels: not built: " in result.stdout and "boom" in result.stdout
        assert (tmp_path / "lib/fairseq_fastweights/_native_build.json").is_file()

    def test_a_build_that_breaks_is_not_laid_to_what_was_asked_for(self, project: Path, tmp_path: Path) -> None:
        (project / "tools/native_build.py").write_text("raise SystemExit('it broke')\n")
        result = self.setup(project, "build", "--build-lib", str(tmp_path / "lib"))
        assert result.returncode != 0 and "it broke" in result.stderr
        assert "tools/native_build.py failed" in result.stderr and "FASTWEIGHTS_BUILD" not in result.stderr

    def test_a_source_distribution_can_be_built_from(self, project: Path, tmp_path: Path) -> None:
        result = self.setup(project, "sdist", "-d", str(tmp_path))
        assert result.returncode == 0, result.stderr
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
