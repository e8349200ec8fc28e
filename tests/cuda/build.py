"""Compiles the CUDA kernels for the host, with the emulator in emulation/, into build/emulation."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock
from native_toolchain import Torch

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).resolve().parent / "emulation"
FOLDERS = (SHIM, ROOT / "cuda")
FLAGS = "-std=c++17 -fPIC -DFASTWEIGHTS_EMULATION -Wall -Wno-unknown-pragmas -fno-strict-aliasing".split()
# The kernels are much code that runs little; the emulator is the other way round.
KERNELS, EMULATOR = "-Og", "-O2"
# A GPU faults on a float4 at an odd address; the host would read it. The emulator makes an error of the trap.
TRAPS = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
# Each access calls a hook, and is found again by the line it is in.
COUNTED = ("-fsanitize=thread", "-g1")
OF_THE_GPU, OF_THE_CPU = (f"TORCH_LIBRARY_IMPL(fairseq_fastweights, {key}, m)" for key in ("CUDA", "CPU"))


def compiler() -> str | None:
    """The C++ compiler to use: $CXX, g++ or clang++, whichever there is."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(
    sources: Sequence[Path] | None = None,
    extra_flags: Sequence[str] | None = None,
    binding: bool = False,
    counts: bool = False,
) -> Path:
    """Compiles `sources` (None: cuda/**/*.cu) and the emulator, to a shared library; objects are kept by content.

    `extra_flags` such as ``-fsanitize=address,undefined`` take the place of the trap for misaligned accesses. With
    `binding` the library has cuda/binding.cpp as well: torch loads it, and runs the operators that this registers, but
    for CPU tensors. With `counts` kernels tell emulation/accesses.cpp of each access.

    Raises:
        RuntimeError: with the compiler's output, if a file does not compile.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler: set CXX, or put g++ or clang++ on PATH")
    folder = ROOT / "build" / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *(extra_flags or (() if "clang" in cxx else TRAPS))]
    libraries: list[str] = []

    def compiled(source: Path, *options: str) -> Path:
        digest = hashlib.sha256("\0".join([cxx, platform.machine(), *flags, *options]).encode())
        for path in read_by(source):
            digest.update(path.read_bytes())
        made = folder / f"{source.stem}-{digest.hexdigest()[:20]}.o"
        includes = [word for path in FOLDERS for word in ("-I", str(path))]
        make(made, [cxx, *flags, *options, *includes, "-x", "c++", "-c", str(source)])
        return made

    with FileLock(folder / "lock"):  # test processes run side by side
        kernels = (KERNELS, *COUNTED) if counts else (KERNELS,)
        work = [(path, *kernels) for path in (sorted(ROOT.glob("cuda/**/*.cu")) if sources is None else sources)]
        work += [(path, EMULATOR) for path in sorted(SHIM.glob("*.cpp"))]
        if binding:
            torch_build = Torch.find()
            text = (ROOT / "cuda" / "binding.cpp").read_text()
            assert text.count(OF_THE_GPU) == 1
            (folder / "binding.cpp").write_text(text.replace(OF_THE_GPU, OF_THE_CPU))
            options = [*torch_build.compile_flags, *torch_build.include_flags, f"-DTORCH={torch_build.version}"]
            work.append((folder / "binding.cpp", KERNELS, *options))
            libraries = [f"-L{torch_build.library_folder}", "-lc10", "-ltorch_cpu", "-ltorch"]
        # The largest first, so that no core waits for the last file.
        work.sort(key=lambda item: -sum(path.stat().st_size for path in read_by(item[0])))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = sorted(map(str, pool.map(lambda item: compiled(*item), work)))
        link = [cxx, *flags, "-shared", *objects, *libraries]
        library = folder / f"kernels-{hashlib.sha256(' '.join(link).encode()).hexdigest()[:20]}.so"
        make(library, link)
    return library


def read_by(source: Path) -> list[Path]:
    """A file and all of ours that it includes."""
    found, waiting = set(), [source]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'^#include ["<](.+)[">]', path.read_text(), re.MULTILINE)
            places = (folder / name for folder in (path.parent, *FOLDERS) for name in names)
            waiting += [place.resolve() for place in places if place.is_file()]
    return sorted(found)


def make(target: Path, command: list[str]) -> None:
    """Runs a command that writes the file after -o, unless that exists."""
    if target.exists():
        return
    part = target.with_suffix(".part")
    done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    part.replace(target)
