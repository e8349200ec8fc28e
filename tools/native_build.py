"""Builds the kernels' libraries: cpu/ into ``_native_cpu.so`` and cuda/ into ``_native_cuda.so``.

    python tools/native_build.py [--into FOLDER] [--sanitize]

They go beside the package's modules with ``_native_build.json``, the record that `fairseq_fastweights.ops.libraries`
reads. FASTWEIGHTS_BUILD chooses the parts:

- ``auto`` (the default): all that can be built, CUDA kernels only for this machine's GPUs. Any other part leaves one
  line that says why and how to mend it.
- ``cpu`` or ``cuda``: that part, and cuda includes cpu; if it cannot be built, that is an error. With cuda,
  TORCH_CUDA_ARCH_LIST (as "8.0;9.0") replaces this machine's GPUs.
- ``none``.

FASTWEIGHTS_BUILD_ISA says for which of the instruction sets in `VARIANTS` the CPU kernels are compiled: ``here`` (the
default), the best one that this machine's processor has; ``all``, for a wheel or a folder that several machines share;
or some by name, as in "avx2 avx512". Kernels of which the processor has none are refused when they are loaded.

MAX_JOBS is how many compilers run at a time, by default one for each core.

Objects are kept in build/native, under names made from all that went into them: only changes are compiled again.
"""

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
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NamedTuple

from native_toolchain import (
    STABLE_ABI,
    STABLE_ABI_FLAG,
    HostCompiler,
    Nvcc,
    Torch,
    Unavailable,
    generate_code_flags,
    is_x86,
    output,
)

ROOT = Path(__file__).resolve().parents[1]
CHOICES = {"auto": (), "cpu": ("cpu",), "cuda": ("cpu", "cuda"), "none": ()}
"""Values of FASTWEIGHTS_BUILD, and the parts without which each fails."""

CPU_FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -Wall -DNDEBUG -O3 -fno-math-errno -ffp-contract=fast".split()
HEADERS = (".h", ".hpp", ".inl", ".cuh")
NUMBERS = {"float32": (), "float64": ("-O2",)}
"""The numbers that cpu/kernels.cpp is compiled for; float64 in half of the time that -O3 takes, and as fast to 2%."""
VARIANTS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
"""The instruction sets that cpu/kernels.cpp can be compiled for, two of them on x86-64 alone; the best comes last."""
SANITIZERS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all".split()
# Without -lineinfo, which makes the library three times as large; NVCC_APPEND_FLAGS=-lineinfo adds it.
NVCC_FLAGS = ("-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-DNDEBUG")

# The package's own idea of names, records and digests; by path, since importing the package would import torch.
_spec = importlib.util.spec_from_file_location("native_libraries", ROOT / "fairseq_fastweights/ops/libraries.py")
assert _spec is not None and _spec.loader is not None
LIBRARIES: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(LIBRARIES)


class Compilation(NamedTuple):
    """One source to compile; `identity` is that of the compiler and, where its headers are used, torch."""

    source: Path
    command: tuple[str, ...]
    identity: str
    title: str = ""

    def key(self) -> str:
        """A digest of everything that the object is made from: of headers, all of its part and of native/."""
        folder = next((path for path in self.source.parents if path.name in LIBRARIES.PARTS), self.source.parent)
        folders = (folder, folder.parent / LIBRARIES.SHARED)
        headers = {path for folder in folders for path in folder.rglob("*") if path.suffix in HEADERS}
        files = (path.name.encode() + b"\0" + path.read_bytes() for path in (self.source, *sorted(headers)))
        return digest(self.identity, *self.command, *(hashlib.sha256(file).hexdigest() for file in files))


class Plan(NamedTuple):
    """How a part is built: objects and output come between `link` and its libraries; the record has the `facts`."""

    compilations: list[Compilation]
    link: list[str]
    link_libraries: list[str]
    facts: dict[str, Any]


def instruction_sets(compiler: HostCompiler, listed: str) -> list[str]:
    """The `VARIANTS` that `listed` asks for, as FASTWEIGHTS_BUILD_ISA does; `Unavailable` if it is unknown."""
    # On other processors the compiler has no such flags.
    known = list(VARIANTS) if is_x86() else ["baseline"]
    if listed == "all":
        return known
    names = re.findall(r"[^;, ]+", listed)
    if listed != "here" and set(names) <= set(known):
        return [name for name in known if name in names]
    if listed != "here":
        asked = f"FASTWEIGHTS_BUILD_ISA is {listed!r}; let it be here, all, or some of {', '.join(known)},"
        raise Unavailable(f"{asked} and build again")
    macros = output([*compiler.command, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    runs = [name for name in known if all(f"__{flag[2:].upper()}__ " in macros for flag in VARIANTS[name])]
    return runs[-1:] if macros else known  # all, if the compiler cannot tell


def plan_cpu(torch: Torch, sanitize: bool) -> Plan:
    """Raises `Unavailable` if it cannot be built. With sanitizers it is of all instruction sets."""
    folder = ROOT / "cpu"
    if not (folder / "kernels.cpp").is_file():
        raise Unavailable("the folder cpu/ was not among the sources; build from a whole checkout")
    compiler = HostCompiler.find()
    listed = "all" if sanitize else os.environ.get("FASTWEIGHTS_BUILD_ISA") or "here"
    variants = instruction_sets(compiler, listed)
    flags = [*CPU_FLAGS, *(SANITIZERS if sanitize else ())]
    # By source the titles of its objects, with the flags of each and the versions that they depend on.
    # Without a stable ABI, torch's own headers start its threads.
    stable = torch.has_stable_abi
    of_torch = (*torch.include_flags, *torch.compile_flags, STABLE_ABI_FLAG if stable else "-fopenmp")

    def defines(name: str, numbers: str) -> tuple[str, str]:
        return f"-DFAST_WEIGHTS_ISA={name}", f"-DFAST_WEIGHTS_NUMBERS={numbers}"

    special = {
        "kernels": [
            (f"kernels, {name}, {numbers}", (*VARIANTS[name], *(() if sanitize else more), *defines(name, numbers)), "")
            for name in variants
            for numbers, more in NUMBERS.items()
        ],
        "dispatch": [("dispatch", tuple(f"-DFAST_WEIGHTS_HAVE_{name.upper()}=1" for name in variants), "")],
        **{name: [(name, of_torch, f"\n{torch.version}")] for name in ("binding", "steps_binding")},
    }
    compilations = [
        Compilation(source, (*compiler.command, *flags, *more), compiler.version + also, title)
        for source in sorted(folder.glob("*.cpp"), reverse=True)  # the kernels, which take longest, first
        for title, more, also in special.get(source.stem, [(source.stem, (), "")])
    ]
    system = {"linux": ("-Wl,-z,defs", "-s"), "darwin": ("-undefined", "dynamic_lookup")}.get(sys.platform, ())
    link = [*compiler.command, "-shared", *(SANITIZERS if sanitize else system)]
    libraries = [f"-L{torch.library_folder}", "-ltorch_cpu"]
    libraries += [] if stable else ["-lc10", str(torch.openmp_library or "-fopenmp")]
    facts = {"compiler": f"{compiler.name}: {compiler.version}", "flags": " ".join(flags), "variants": variants}
    return Plan(compilations, link, libraries, facts | ({"oldest torch": STABLE_ABI} if stable else {}))


def plan_cuda(torch: Torch, listed: str) -> Plan:
    """For the architectures that are listed, or for the GPUs that are there; `Unavailable` if it cannot be built."""
    if torch.cuda is None:
        raise Unavailable(f"torch {torch.version} has no CUDA; for a GPU, install one that has and build again")
    folder = ROOT / "cuda"
    kernels = sorted(folder.rglob("*.cu"))
    if not kernels:
        raise Unavailable("the folder cuda/ was not among the sources; build from a whole checkout")
    nvcc = Nvcc.find(torch.cuda)
    compiler = HostCompiler.find()
    architectures = nvcc.architectures(torch, listed)
    # nvcc takes gcc of its own accord; the one that CXX names must be named to it: a program alone, which is the last
    # word before the options in "ccache g++ -m64".
    *_, program = takewhile(lambda word: not word.startswith("-"), compiler.command)
    host = [f"-ccbin={program}"] if os.environ.get("CXX") else []
    identity = f"nvcc {nvcc.version}\n{nvcc.more_flags}\n{compiler.version}"
    command = (nvcc.command, *NVCC_FLAGS, *host, *generate_code_flags(architectures))
    binding = (*compiler.command, *"-O2 -fPIC -fvisibility=hidden -Wall -DNDEBUG".split())
    binding += ("-isystem", str(nvcc.include_folder), *torch.include_flags, *torch.compile_flags)
    compilations = [Compilation(source, command, identity, f"{source.parent.name}/{source.stem}") for source in kernels]
    identity += f"\n{torch.version}"
    compilations += [Compilation(source, binding, identity, source.stem) for source in folder.glob("*.cpp")]
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


def build_part(part: str, choice: str, sanitize: bool) -> str | None:
    """Builds a part unless it is there; returns None, or the line that says why it was not built."""
    library, cache = LIBRARIES.library(part), ROOT / "build" / "native"
    LIBRARIES.log(part).unlink(missing_ok=True)  # of an earlier build
    try:
        if choice == "none" or (choice == "cpu" and part == "cuda"):
            raise Unavailable(f"FASTWEIGHTS_BUILD was {choice}; in the project's sources, build again without it")
        torch = Torch.find()
        sources = LIBRARIES.source_digest(ROOT, part)
        # Containers list every architecture that there is: the list counts where CUDA kernels are asked for.
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "") if choice == "cuda" else ""
        plan = plan_cpu(torch, sanitize) if part == "cpu" else plan_cuda(torch, listed)
        objects = {cache / f"{work.key()}.o": work for work in plan.compilations}
        key = digest(*(target.stem for target in objects), torch.version, *plan.link, *plan.link_libraries)
        entry = {"state": "built", "torch": torch.version, "sources": sources, **plan.facts, "build": key}
        if LIBRARIES.record().get(part) == entry and library.is_file():
            return None
        # Until the new library is in place, the record must not speak of the old one as if it were this one.
        write_record(part, {"state": "missing", "reason": "the build did not finish; build again"})
        started = time.monotonic()
        compile_all(part, {target: work for target, work in objects.items() if not target.exists()}, plan)
        run([*plan.link, *map(str, objects), *plan.link_libraries], library, LIBRARIES.log(part))
        print(f"{LIBRARIES.PARTS[part]} kernels: built in {time.monotonic() - started:.0f} s", flush=True)
    except Unavailable as reason:
        library.unlink(missing_ok=True)
        entry = {"state": "missing", "reason": str(reason)}
    write_record(part, entry)
    return entry.get("reason")


def compile_all(part: str, wanting: dict[Path, Compilation], plan: Plan) -> None:
    """Compiles each source into its object, as many at a time as `jobs` says, and says which are done."""
    name, started, total = f"{LIBRARIES.PARTS[part]} kernels", time.monotonic(), len(plan.compilations)
    gpus = f" for {', '.join(plan.facts['architectures'])}, minutes each" if part == "cuda" else ""
    print(f"{name}: compiling {len(wanting)} of {total} files{gpus}, {jobs()} at a time", flush=True)

    done: list[str] = []

    def compile_one(target: Path) -> None:
        work, began = wanting[target], time.monotonic()
        run([*work.command, "-c", str(work.source)], target, LIBRARIES.log(part))
        done.append(work.title)
        took = f"{time.monotonic() - began:.0f} s, {time.monotonic() - started:.0f} s in all"
        print(f"{name}: {len(done)} of {len(wanting)}: {work.title} ({took})", flush=True)

    with ThreadPoolExecutor(jobs()) as pool:
        list(pool.map(compile_one, wanting))  # the first that fails calls off those that have not begun


def run(command: list[str], target: Path, log: Path) -> None:
    """Runs a compiler whose output is `target`, which is there whole or not at all.

    Raises `Unavailable` if it fails, with one line of its output and the likely remedy; the log has the whole.
    """
    new = target.with_suffix(".new")
    command = [*command, "-o", str(new)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode == 0:
        new.replace(target)
        return
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{result.stdout}")
    text, compiler = result.stdout, command[0]
    lines = [line.strip() for line in text.splitlines()] or ["no output"]
    said = next((line for line in lines if re.search(r"error|undefined reference|cannot find", line)), lines[-1])
    remedies = {
        "unsupported (GNU|clang) version": "name an older host compiler with CXX=...",
        "Killed|[Oo]ut of memory": "let MAX_JOBS be 1",
        "cannot find -l|No such file": "install the missing library or file",
        "": "try another compiler with CXX=...",
    }
    remedy = next(remedy for pattern, remedy in remedies.items() if re.search(pattern, text))
    raise Unavailable(f"{compiler} failed ({said}); {remedy} and build again")


def write_record(part: str, entry: dict[str, Any]) -> None:
    path: Path = LIBRARIES.PACKAGE / LIBRARIES.RECORD
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({**LIBRARIES.record(), part: entry}, indent=1) + "\n")
    temporary.replace(path)


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def jobs() -> int:
    """How many compilers run at a time."""
    asked = os.environ.get("MAX_JOBS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(asked)) if asked.isdigit() else cores or 1


def wait_for(lock: IO[str], holder: str) -> None:
    """Takes the lock; if another process has it, says that it waits for the `holder`. It is released with the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for {holder} to end ...", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def main(arguments: list[str] | None = None) -> int:
    """Builds, names parts that were not built, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds the compiled kernels that can be built here.")
    parser.add_argument("--into", type=Path, help="default: into the package in this checkout")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan, the CPU part alone")
    options = parser.parse_args(arguments)
    choice = "cpu" if options.sanitize else os.environ.get("FASTWEIGHTS_BUILD") or "auto"
    if choice not in CHOICES:
        print(f"error: FASTWEIGHTS_BUILD is {choice!r}; it must be one of {', '.join(CHOICES)}", file=sys.stderr)
        return 2
    if options.into is not None:
        LIBRARIES.PACKAGE = options.into.resolve()
    for folder in (LIBRARIES.PACKAGE, ROOT / "build" / "native"):
        folder.mkdir(parents=True, exist_ok=True)
    status = 0
    with (ROOT / "build" / "native" / "lock").open("w") as lock:
        # A second build in this checkout waits until this one ends, however it ends.
        wait_for(lock, "another build of this checkout's kernels")
        for part, name in LIBRARIES.PARTS.items():
            reason = build_part(part, choice, options.sanitize)
            if reason is None:
                print(f"{name} kernels: ready")
                continue
            log = LIBRARIES.log(part)
            print(f"{name} kernels: not built: {reason}" + (f"; its whole output: {log}" if log.exists() else ""))
            status = max(status, int(part in CHOICES[choice]))
    return status


if __name__ == "__main__":
    sys.exit(main())
