"""A wheel is for every Python and for every torch from 2.10 on: what `make wheel` builds, before auditwheel tags it."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import native_build
import pytest
from native_toolchain import Torch, Unavailable

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "native"


def read(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_it_holds_the_package_and_kernels_that_need_the_stable_abi_alone(tmp_path: Path) -> None:
    """Built in a copy of the sources, from the objects that this checkout has."""
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
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", "dist"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"FASTWEIGHTS_BUILD": "cpu"}, check=True)
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
    # Of the system, what PEP 600 allows.
    assert needed <= {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libstdc++.so.6", "libtorch_cpu.so"}
    symbols = re.findall(r" U (\w+)", read("nm", "--dynamic", "--undefined-only", library))
    # C functions are the stable ABI; C++ names of at, c10 and torch are what changes from release to release.
    assert "torch_parallel_for" in symbols
    assert not [name for name in symbols if re.match(r"_ZN?K?(2at|3c10|5torch)", name)]
