"""setup.py: the sources that pip builds from, the files that it installs, and those in a wheel before auditwheel."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import native_build
import pytest
import torch
from native_toolchain import Torch, Unavailable

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "native"


def read(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files that pip needs, with small sources of kernels, and a library of another environment in the package."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    texts = {
        "cpu/kernels.cpp": "namespace FAST_WEIGHTS_ISA { int FAST_WEIGHTS_NUMBERS() { return 1; } }",
        "cpu/binding.cpp": "int x;",
        "cpu/part/a.h": "",
    }
    texts |= {f"fairseq_fastweights/{name}": "" for name in ("__init__.py", "ops/__init__.py", "_native_cuda.so")}
    texts["fairseq_fastweights/ops/libraries.py"] = (ROOT / "fairseq_fastweights/ops/libraries.py").read_text()
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def setup(folder: Path, *arguments: str, **environment: str) -> None:
    command = [sys.executable, "setup.py", "-q", *arguments]
    subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, check=True)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler here")
@pytest.mark.slow
def test_installing_builds_against_the_torch_that_pip_hides(project: Path, tmp_path: Path) -> None:
    """As in pip: a PYTHONPATH with the build's requirements, and a start that hides all other packages."""
    overlay, packages = tmp_path / "overlay", Path(sysconfig.get_path("purelib"))
    overlay.mkdir()
    for name in ("setuptools", "pkg_resources", "_distutils_hack"):
        if (packages / name).exists():
            (overlay / name).symlink_to(packages / name)
    hide = f"import sys\nsys.path = [path for path in sys.path if path != {str(packages)!r}]\n"
    (overlay / "sitecustomize.py").write_text(hide)
    isolated = {"PYTHONPATH": str(overlay)}
    assert subprocess.run([sys.executable, "-c", "import torch"], env=os.environ | isolated).returncode
    setup(project, "build", "--build-lib", str(tmp_path / "lib"), **isolated)
    package = tmp_path / "lib/fairseq_fastweights"
    assert {path.name for path in package.glob("_native_*")} == {"_native_build.json", "_native_cpu.so"}
    entry = json.loads((package / "_native_build.json").read_text())["cpu"]
    assert entry["state"] == "built" and entry["torch"] == str(torch.__version__)


def test_a_source_distribution_can_be_built_from(project: Path, tmp_path: Path) -> None:
    """fairseq too: the imports of tools/build_fairseq.py and its constraints are among the sources."""
    setup(project, "sdist", "-d", str(tmp_path))
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"cpu/kernels.cpp", "cpu/part/a.h", "constraints.txt", "fairseq_fastweights/ops/libraries.py"} <= names
    assert {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} <= names
    assert not [name for name in names if "_native_" in name or name.endswith(".pyc")]


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_kernels_of_the_stable_abi(tmp_path: Path) -> None:
    """For every torch from 2.10 on; built in a copy of the sources, from the objects that this checkout has."""
    try:
        plan = native_build.plan_cpu(Torch.find(), sanitize=False)
    except Unavailable as reason:
        pytest.skip(str(reason))
    if sys.platform != "linux" or not all((CACHE / f"{work.key()}.o").exists() for work in plan.compilations):
        pytest.skip("the kernels' objects are not in build/native: tools/native_build.py compiles them")
    for folder in ("fairseq_fastweights", "native", "cpu", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("_native_*", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "native").symlink_to(CACHE)
    setup(tmp_path, "bdist_wheel", "--dist-dir", "dist", FASTWEIGHTS_BUILD="cpu")
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        record = json.loads(archive.read("fairseq_fastweights/_native_build.json"))
        library = archive.extract("fairseq_fastweights/_native_cpu.so", tmp_path / "unpacked")
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fairseq_fastweights").rglob("*.py")}
    assert held == modules | {f"fairseq_fastweights/{x}" for x in ("_native_build.json", "_native_cpu.so", "py.typed")}
    assert record["cpu"]["oldest torch"] == "2.10" and record["cuda"]["state"] == "missing"
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", read("readelf", "--dynamic", library)))
    # Libraries of the system that PEP 600 allows.
    assert needed <= {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libstdc++.so.6", "libtorch_cpu.so"}
    symbols = re.findall(r" U (\w+)", read("nm", "--dynamic", "--undefined-only", library))
    # C functions are the stable ABI; C++ names of at, c10 and torch change from release to release.
    assert "torch_parallel_for" in symbols
    assert not [name for name in symbols if re.match(r"_ZN?K?(2at|3c10|5torch)", name)]
