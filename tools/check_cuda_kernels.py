"""Compiles the CUDA kernels for each architecture that counts, and reads what ptxas says of them. Needs no GPU.

    python tools/check_cuda_kernels.py [--architectures 80 90] [FILE ...]

Prints a table of registers, static shared memory and spills, a row for each kernel and architecture. Fails on errors,
on warnings, and on registers that are spilled to memory, except in kernels whose name says `generic`, which take every
shape and are the slow way out for those that nothing is tuned for, or `double`, which is there to check gradients with.

What was compiled without a change since is not compiled again: what the compiler said is kept in build/native/reports.
"""

import argparse
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from native_build import NVCC_FLAGS, ROOT, Compilation, jobs
from native_toolchain import Nvcc, Unavailable, generate_code_flags

ARCHITECTURES = (80, 90)
SMALL_SPILLS = {
    ("delta_backward<__nv_bfloat16, true, true, 4>", "sm_80"): 120,
    ("diagonal_backward<__nv_bfloat16, true, true, 1>", "sm_80"): 32,
    ("diagonal_backward<__half, true, true, 1>", "sm_80"): 32,
    ("delta_decays_backward<__nv_bfloat16, true, 2>", "sm_80"): 36,
    ("delta_decays_backward<__nv_bfloat16, true, 4>", "sm_80"): 36,
    ("delta_decays_backward<__half, true, 4>", "sm_80"): 48,
    ("delta_decays_backward<__nv_bfloat16, true, 2>", "sm_90"): 40,
    ("delta_decays_backward<__nv_bfloat16, true, 4>", "sm_90"): 40,
    ("delta_decays_backward<__half, true, 4>", "sm_90"): 28,
    ("delta_decays_backward<float, true, 2>", "sm_90"): 56,
    ("delta_decays_backward<float, true, 4>", "sm_90"): 40,
}
"""Bytes that these may spill, stored and loaded together: those of the delta rule have all 255 registers, of the others
two blocks share a multiprocessor. What it costs is unmeasured."""


class Kernel(NamedTuple):
    """What ptxas says of one kernel, compiled for one architecture. Sizes are in bytes, those of memory per thread."""

    name: str
    architecture: str
    registers: int = 0
    shared_memory: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


def read_compiler_output(text: str) -> tuple[list[Kernel], list[str]]:
    """The kernels, and the faults, warnings and spills, in the output of ``nvcc -Xptxas -v``."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    properties: dict[str, int] = {}  # of the function that ptxas spoke of last
    faults = []
    for line in text.splitlines():
        if re.search(r"\bwarning\b", line, re.IGNORECASE) and not line.startswith("ptxas info"):
            faults.append(line.strip())
        elif said := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            properties = found[said[1], said[2]] = {}
        elif "Function properties for " in line and "registers" in properties:
            properties = {}  # those of a function that was not inlined come after those of the kernel that calls it
        elif said := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            for name, number in zip(("stack", "spill_stores", "spill_loads"), said.groups(), strict=True):
                properties[name] = properties.get(name, 0) + int(number)
        elif said := re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", line):
            properties |= {"registers": int(said[1]), "shared_memory": int(said[2] or 0)}
    names = [name for name, _ in found]
    if names and shutil.which("c++filt"):  # without parameters and return types
        command = ["c++filt", "-p"]
        text = subprocess.run(command, input="\n".join(names), capture_output=True, text=True, check=True).stdout
        names = re.sub(r"\(anonymous namespace\)::|fairseq_fastweights::", "", text).splitlines()
    kernels = [Kernel(name, sm, **facts) for name, ((_, sm), facts) in zip(names, found.items(), strict=True)]
    return kernels, faults + [fault for kernel in kernels for fault in spills(kernel)]


def spills(kernel: Kernel) -> list[str]:
    """What is wrong with the registers that a kernel spills."""
    stores, loads = kernel.spill_stores, kernel.spill_loads
    allowed = SMALL_SPILLS.get((kernel.name, kernel.architecture), 0)
    if stores + loads <= allowed or re.search("[gG]eneric|double", kernel.name):
        return []
    return [f"{kernel.name} spills registers: {stores} bytes stored, {loads} loaded"]


def check(nvcc: Nvcc, source: Path, architecture: int) -> tuple[list[Kernel], list[str]]:
    """Kernels and faults of `source`, from what the compiler said the last time if nothing changed since."""
    reports = ROOT / "build" / "native" / "reports"
    flags = [*NVCC_FLAGS, "-Xptxas=-v", *generate_code_flags([f"sm_{architecture}"])]
    work = Compilation(source, (nvcc.command, *flags), f"{nvcc.version}\n{nvcc.more_flags}")
    kept = reports / f"{work.key()}.txt"
    if not kept.is_file():
        reports.mkdir(parents=True, exist_ok=True)
        target, new = kept.with_suffix(".o"), kept.with_suffix(".new")
        command = [*work.command, "-c", str(source), "-o", str(target)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        target.unlink(missing_ok=True)
        if result.returncode:
            return [], [f"does not compile:\n{result.stdout}"]
        new.write_text(result.stdout)
        new.replace(kept)
    return read_compiler_output(kept.read_text())


def table(kernels: list[Kernel]) -> str:
    """A row for each kernel and architecture."""
    rows: list[tuple[str, ...]] = [("kernel", "for", "registers", "smem", "stack", "spilled (stores + loads)")]
    for *facts, stores, loads in sorted(kernels):
        rows.append((*map(str, facts), f"{stores} + {loads}" if stores + loads else "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Checks, prints the table, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Compiles the CUDA kernels and fails where they spill registers.")
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES, metavar="SM")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="default: all of cuda/")
    options = parser.parse_args(arguments)
    sources = [path.resolve() for path in options.files] or sorted((ROOT / "cuda").rglob("*.cu"))
    try:
        nvcc = Nvcc.find()
    except Unavailable as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    work = [(source, architecture) for source in sources for architecture in options.architectures]
    with ThreadPoolExecutor(jobs()) as pool:
        found = list(pool.map(lambda item: check(nvcc, *item), work))
    kernels = [kernel for own, _ in found for kernel in own]
    print(table(kernels))
    pairs = zip(work, found, strict=True)
    wrong = [
        f"{source.parent.name}/{source.name}, sm_{number}: {fault}"
        for (source, number), (_, faults) in pairs
        for fault in faults
    ]
    print("\n".join(wrong), file=sys.stderr)
    print(f"{len(kernels)} kernels of {len(sources)} files (each architecture counted), {len(wrong)} faults")
    return 1 if wrong or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
