"""Builds the kernels' libraries: cpu/ into ``_native_cpu.so`` and cuda/ into ``_native_cuda.so``.

    python tools/native_build.py [--into FOLDER] [--sanitize]

They go beside the package's modules with ``_native_build.json``, the record that `fairseq_fastweights.ops.libraries`
reads. The environment variable FASTWEIGHTS_BUILD says what is built: ``auto`` (the default: what can be; a part that
cannot be built leaves one line that says why and how to mend it, and the rest works without it), ``cpu`` or ``cuda``
(that, and cuda includes cpu; what cannot be built is an error) or ``none``. MAX_JOBS is how many compilers run at a
time, by default one for each core and at most four.

Compiled objects are kept in build/native, under names made from all that went into them, so only what changed is
compiled again; where nothing did, this takes a fraction of a second and does not import torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from native_toolchain import HostCompiler, Nvcc, Torch, Unavailable, generate_code_flags, is_x86

ROOT = Path(__file__).resolve().parents[1]
CHOICES = {"auto": (), "cpu": ("cpu",), "cuda": ("cpu", "cuda"), "none": ()}
"""What FASTWEIGHTS_BUILD may say, and the parts without which that fails."""

CPU_FLAGS = (
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-DNDEBUG"),
    *("-O3", "-fno-math-errno", "-ffp-contract=fast"),
)
VARIANTS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
"""The instruction sets that cpu/kernels.cpp is compiled for; the last two on x86-64 alone. Which one runs is chosen at
run time: nothing is compiled for the machine that compiles it."""

SANITIZERS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

NVCC_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-DNDEBUG")
"""-lineinfo is not among them: it makes the library three times as large. NVCC_APPEND_FLAGS=-lineinfo adds it."""


def load_libraries_module(package: Path | None = None) -> ModuleType:
    """The package's own idea of names, records and digests; by path, since importing the package would import torch.

    It speaks of the libraries in the folder `package`, by default those of the checkout.
    """
    spec = importlib.util.spec_from_file_location("native_libraries", ROOT / "fairseq_fastweights/ops/libraries.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update({} if package is None else {"PACKAGE": package})
    return module


LIBRARIES = load_libraries_module()


@dataclass(frozen=True)
class Compilation:
    """One source to compile, and all that its object depends on."""

    source: Path
    command: tuple[str, ...]
    identity: str
    """Of the compiler and, where its headers are used, torch."""
    title: str

    def key(self) -> str:
        """A digest of everything that the object is made from. Headers count for all sources of their folder."""
        digest = hashlib.sha256()
        for text in (self.identity, *self.command):
            digest.update(text.encode() + b"\0")
        headers = (
            path for path in sorted(self.source.parent.rglob("*")) if path.suffix in (".h", ".hpp", ".inl", ".cuh")
        )
        for path in (self.source, *headers):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:24]


@dataclass(frozen=True)
class Plan:
    """How a part is built."""

    compilations: list[Compilation]
    link: list[str]
    """The command, to which objects and output are added."""
    link_libraries: list[str]
    facts: dict[str, Any]
    """What the record says of it."""


def plan_cpu(torch: Torch, sanitize: bool) -> Plan:
    """Raises `Unavailable` if it cannot be built."""
    folder = ROOT / "cpu"
    kernels = folder / "kernels.cpp"
    if not kernels.is_file():
        raise Unavailable("the folder cpu/ was not among the sources; build from a whole checkout")
    compiler = HostCompiler.find()
    openmp = openmp_flags(compiler)
    variants = VARIANTS if is_x86() else {"baseline": VARIANTS["baseline"]}
    flags = [*CPU_FLAGS, *openmp, *(SANITIZERS if sanitize else ())]
    if len(variants) > 1:
        flags.append("-DFAST_WEIGHTS_HAVE_X86_VARIANTS=1")
    command = (*compiler.command, *flags)
    with_torch = (*command, *torch.include_flags, *torch.compile_flags)
    compilations = [
        *(
            Compilation(
                kernels, (*command, *options, f"-DFAST_WEIGHTS_ISA={name}"), compiler.version, f"kernels, {name}"
            )
            for name, options in variants.items()
        ),
        Compilation(folder / "binding.cpp", with_torch, f"{compiler.version}\n{torch.version}", "binding"),
        *(
            Compilation(source, command, compiler.version, source.stem)
            for source in sorted(folder.glob("*.cpp"))
            if source.stem not in ("kernels", "binding")
        ),
    ]
    link = [*compiler.command, "-shared"]
    libraries = [f"-L{torch.library_folder}", "-lc10", "-ltorch_cpu", "-ltorch"]
    if openmp:
        libraries.append(str(torch.openmp_library or "-fopenmp"))
    if sanitize:
        link += SANITIZERS
    elif sys.platform == "linux":
        link += ["-Wl,-z,defs", "-s"]
    if sys.platform == "darwin":
        link += ["-undefined", "dynamic_lookup"]
    facts = {
        "compiler": f"{compiler.name}: {compiler.version}",
        "flags": " ".join(flags),
        "variants": list(variants),
        "openmp": bool(openmp),
    }
    return Plan(compilations, link, libraries, facts)


def plan_cuda(torch: Torch) -> Plan:
    """Raises `Unavailable` if it cannot be built."""
    if torch.cuda is None:
        raise Unavailable(
            f"torch {torch.version} has no CUDA; for a GPU of NVIDIA, install one that has and build again"
        )
    folder = ROOT / "cuda"
    kernels = sorted(folder.rglob("*.cu"))
    if not kernels:
        raise Unavailable("the folder cuda/ was not among the sources; build from a whole checkout")
    nvcc = Nvcc.find(torch.cuda)
    compiler = HostCompiler.find()
    architectures = nvcc.architectures(torch)
    # nvcc takes gcc of its own accord; the one that CXX names must be named to it: a program alone, which is the last
    # word before the options in "ccache g++ -m64".
    *_, program = takewhile(lambda word: not word.startswith("-"), compiler.command)
    host = [f"-ccbin={program}"] if os.environ.get("CXX") else []
    command = (nvcc.command, *NVCC_FLAGS, *host, *generate_code_flags(architectures))
    identity = f"nvcc {nvcc.version}\n{nvcc.more_flags}\n{compiler.version}"
    compilations = [Compilation(source, command, identity, source.stem) for source in kernels]
    binding_flags = (
        *("-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-DNDEBUG"),
        *("-isystem", str(nvcc.include_folder), *torch.include_flags, *torch.compile_flags),
    )
    compilations += [
        Compilation(source, (*compiler.command, *binding_flags), f"{identity}\n{torch.version}", source.stem)
        for source in sorted(folder.glob("*.cpp"))
    ]
    # nvcc links, for it knows where its own libraries are; its runtime is the one that torch has loaded.
    link = [nvcc.command, "-shared", "-cudart=shared", *host]
    libraries = [f"-L{torch.library_folder}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", "-ltorch"]
    facts = {
        "compiler": f"{nvcc.command}: CUDA {nvcc.version}; {compiler.name}: {compiler.version}",
        "flags": " ".join([*NVCC_FLAGS, nvcc.more_flags]).strip(),
        "cuda": torch.cuda,
        "architectures": architectures,
    }
    return Plan(compilations, link, libraries, facts)


def openmp_flags(compiler: HostCompiler) -> list[str]:
    """["-fopenmp"], or nothing for a compiler without OpenMP: the kernels then run on one thread."""
    program = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
    command = [*compiler.command, "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    return [] if subprocess.run(command, input=program, capture_output=True, text=True).returncode else ["-fopenmp"]


class Builder:
    """Builds into a folder, and keeps its record."""

    def __init__(self, into: Path, sanitize: bool = False) -> None:
        self.libraries = load_libraries_module(into)
        self.sanitize = sanitize
        self.cache = ROOT / "build" / "native"

    def build(self, choice: str) -> dict[str, str | None]:
        """Builds what `choice` of `CHOICES` asks for; returns, by part, None or the line that says why it was not."""
        self.libraries.PACKAGE.mkdir(parents=True, exist_ok=True)
        self.cache.mkdir(parents=True, exist_ok=True)
        with self.lock():
            return {part: self.build_part(part, choice) for part in LIBRARIES.PARTS}

    def build_part(self, part: str, choice: str) -> str | None:
        # Whatever comes of this, an older compiler's output says nothing about it.
        self.libraries.log(part).unlink(missing_ok=True)
        try:
            if choice == "none" or (choice == "cpu" and part == "cuda"):
                raise Unavailable(f"FASTWEIGHTS_BUILD was {choice}; build again without it")
            torch = Torch.find()
            sources = LIBRARIES.source_digest(ROOT / part)
            plan = plan_cpu(torch, self.sanitize) if part == "cpu" else plan_cuda(torch)
            entry = {"state": "built", "torch": torch.version, "sources": sources, **plan.facts}
            keys = [compilation.key() for compilation in plan.compilations]
            linked = hashlib.sha256("\0".join([*keys, torch.version, *plan.link, *plan.link_libraries]).encode())
            entry["build"] = linked.hexdigest()[:24]
            if self.libraries.record().get(part) == entry and self.libraries.library(part).is_file():
                return None
            self.compile_and_link(part, plan, keys)
        except Unavailable as reason:
            self.libraries.library(part).unlink(missing_ok=True)
            entry = {"state": "missing", "reason": str(reason)}
        self.write(part, entry)
        return entry.get("reason")

    def compile_and_link(self, part: str, plan: Plan, keys: list[str]) -> None:
        """Makes the library anew; raises `Unavailable` if a compiler fails, whose output is then in the log."""
        name = LIBRARIES.PARTS[part]
        objects = [self.cache / f"{key}.o" for key in keys]
        wanting = [
            (work, target) for work, target in zip(plan.compilations, objects, strict=True) if not target.exists()
        ]
        started = time.monotonic()
        if wanting:
            titles = "; ".join(work.title for work, _ in wanting)
            print(f"{name} kernels: compiling {len(wanting)} of {len(objects)} objects ({titles})", flush=True)
        with ThreadPoolExecutor(jobs()) as pool:
            # The first that fails calls off those that have not begun.
            list(pool.map(lambda item: self.run(part, [*item[0].command, "-c", str(item[0].source)], item[1]), wanting))
        # Until the new library is in place, the record must not speak of the old one as if it were this one.
        self.write(part, {"state": "missing", "reason": "the build did not finish; build again"})
        self.run(part, [*plan.link, *map(str, objects), *plan.link_libraries], self.libraries.library(part))
        self.libraries.log(part).unlink()
        for target in objects:
            os.utime(target)
        self.forget_old_objects()
        print(f"{name} kernels: built in {time.monotonic() - started:.0f} s", flush=True)

    def run(self, part: str, command: list[str], target: Path) -> None:
        """Runs a compiler whose output is `target`, which is there whole or not at all."""
        temporary = target.with_name(f"{target.name}.{os.getpid()}.new")
        result = subprocess.run(
            [*command, "-o", str(temporary)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with self.libraries.log(part).open("a") as log:
            log.write(f"$ {' '.join(command)} -o {target}\n{result.stdout}")
        if result.returncode:
            temporary.unlink(missing_ok=True)
            raise Unavailable(self.failure(command[0], result.stdout))
        temporary.replace(target)

    @staticmethod
    def failure(compiler: str, text: str) -> str:
        """One line of what a compiler said, and the likely remedy."""
        lines = [line.strip() for line in text.splitlines()]
        telling = (line for line in lines if re.search(r"error|undefined reference|cannot find", line))
        said = next(telling, lines[-1] if lines else "no output")
        if "unsupported GNU version" in text or "unsupported clang version" in text:
            return f"nvcc cannot use this host compiler ({said}); name an older one with CXX=... and build again"
        if "Killed" in text or "out of memory" in text.lower():
            return f"{compiler} ran out of memory; build again with MAX_JOBS=1"
        if "cannot find -l" in text or "No such file" in text:
            return f"{compiler} failed ({said}); install what it misses and build again"
        return f"{compiler} failed ({said}); try another compiler with CXX=... and build again"

    def write(self, part: str, entry: dict[str, Any]) -> None:
        path: Path = self.libraries.PACKAGE / self.libraries.RECORD
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({**self.libraries.record(), part: entry}, indent=1) + "\n")
        temporary.replace(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps a second build in this checkout waiting until this one ends, however it ends."""
        with (self.cache / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("another build is at work in this checkout; waiting for it", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def forget_old_objects(self) -> None:
        """Removes objects that no build has used for two weeks."""
        for path in self.cache.glob("*.o*"):
            if path.stat().st_mtime < time.time() - 14 * 24 * 3600:
                path.unlink(missing_ok=True)


def jobs() -> int:
    """How many compilers run at a time; more than four may want more memory than there is."""
    asked = os.environ.get("MAX_JOBS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(asked)) if asked.isdigit() else min(4, cores)


def main(arguments: list[str] | None = None) -> int:
    """Builds, says what was not built, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds the compiled kernels that can be built here.")
    parser.add_argument(
        "--into", type=Path, default=LIBRARIES.PACKAGE, help="default: into the package in this checkout"
    )
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan, the CPU part alone")
    options = parser.parse_args(arguments)
    choice = "cpu" if options.sanitize else os.environ.get("FASTWEIGHTS_BUILD") or "auto"
    if choice not in CHOICES:
        print(f"error: FASTWEIGHTS_BUILD is {choice!r}; it must be one of {', '.join(CHOICES)}", file=sys.stderr)
        return 2
    builder = Builder(options.into.resolve(), options.sanitize)
    reasons = builder.build(choice)
    status = 0
    for part, reason in reasons.items():
        if reason is None:
            print(f"{LIBRARIES.PARTS[part]} kernels: ready")
            continue
        log = f"; its whole output: {builder.libraries.log(part)}" if builder.libraries.log(part).exists() else ""
        print(f"{LIBRARIES.PARTS[part]} kernels: not built: {reason}{log}")
        if part in CHOICES[choice]:
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
