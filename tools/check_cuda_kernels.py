"""Compiles the CUDA kernels for each architecture that counts, and reads what ptxas says of them. Needs no GPU.

    python tools/check_cuda_kernels.py [--architectures 80 90] [FILE ...]

Prints a table of registers, static shared memory and spills, a row for each kernel and architecture. Fails on errors,
on warnings, and on registers that are spilled to memory, except in kernels whose name says `generic`, which take every
shape and are the slow way out for those that nothing is tuned for, or `double`, which is there to check gradients with.

What was compiled without a change since is not compiled again: what the compiler said is kept in build/native/reports.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from native_build import NVCC_FLAGS, ROOT, Compilation, jobs
from native_toolchain import Nvcc, Unavailable, generate_code_flags

ARCHITECTURES = (80, 90)


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel, compiled for one architecture. Sizes are in bytes, those of memory per thread."""

    name: str
    architecture: str
    registers: int = 0
    shared_memory: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0


@dataclass(frozen=True)
class Report:
    """What came of one source, compiled for one architecture."""

    kernels: list[Kernel] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


def read_compiler_output(text: str) -> Report:
    """The kernels and warnings in the output of ``nvcc -Xptxas -v``."""
    kernels: dict[tuple[str, str], dict[str, int]] = {}
    properties: dict[str, int] = {}  # of the function that ptxas spoke of last
    warnings = []
    for line in text.splitlines():
        if re.search(r"\bwarning\b", line, re.IGNORECASE) and not line.startswith("ptxas info"):
            warnings.append(line.strip())
        elif found := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            properties = kernels[found[1], found[2]] = {}
        elif re.search(r"Function properties for (\S+)", line):
            # Those of a function that was not inlined come after those of the kernel that calls it.
            if "registers" in properties:
                properties = {}
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            for name, number in zip(("stack", "spill_stores", "spill_loads"), found.groups(), strict=True):
                properties[name] = properties.get(name, 0) + int(number)
        elif found := re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", line):
            properties |= {"registers": int(found[1]), "shared_memory": int(found[2] or 0)}
    names = demangled([name for name, _ in kernels])
    found_kernels = zip(names, kernels.items(), strict=True)
    return Report([Kernel(name, architecture, **facts) for name, ((_, architecture), facts) in found_kernels], warnings)


def demangled(names: list[str]) -> list[str]:
    """C++ names without parameters and return types: as they are, where no c++filt is installed."""
    if not names or shutil.which("c++filt") is None:
        return names
    text = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return re.sub(r"\(anonymous namespace\)::|fairseq_fastweights::", "", text).splitlines()


def check(nvcc: Nvcc, source: Path, architecture: int) -> Report:
    """The report on `source`, from what the compiler said the last time if nothing changed since."""
    reports = ROOT / "build" / "native" / "reports"
    flags = [*NVCC_FLAGS, "-Xptxas=-v", *generate_code_flags([f"sm_{architecture}"])]
    work = Compilation(source, (nvcc.command, *flags), f"{nvcc.version}\n{nvcc.more_flags}")
    kept = reports / f"{work.key()}.txt"
    if not kept.is_file():
        reports.mkdir(parents=True, exist_ok=True)
        target = kept.with_suffix(".o")
        command = [*work.command, "-c", str(source), "-o", str(target)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        target.unlink(missing_ok=True)
        if result.returncode:
            return Report(error=result.stdout)
        kept.with_suffix(".new").write_text(result.stdout)
        kept.with_suffix(".new").replace(kept)
    return read_compiler_output(kept.read_text())


SMALL_SPILLS = {
    ("delta_backward<__nv_bfloat16, true, true, 4>", "sm_80"): 120,
    ("diagonal_backward<__nv_bfloat16, true, true, 1>", "sm_80"): 32,
    ("diagonal_backward<__half, true, true, 1>", "sm_80"): 32,
}
"""Bytes that these may spill, stored and loaded together: the first has the largest tile and all 255 registers, of the
others two blocks share a multiprocessor. What it costs is unmeasured."""


def table(kernels: Sequence[Kernel]) -> str:
    """A row for each kernel and architecture."""
    rows = [("kernel", "for", "registers", "smem", "stack", "spilled (stores + loads)")]
    for kernel in sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture)):
        spilled = f"{kernel.spill_stores} + {kernel.spill_loads}" if kernel.spills else "-"
        numbers = (str(kernel.registers), str(kernel.shared_memory), str(kernel.stack))
        rows.append((kernel.name, kernel.architecture, *numbers, spilled))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def faults(reports: dict[tuple[str, int], Report]) -> list[str]:
    """What must not be, a line for each; reports are by source and architecture."""
    lines = []
    for (source, architecture), report in reports.items():
        found = [] if report.error is None else [f"does not compile:\n{report.error}"]
        found += report.warnings
        found += [
            f"{kernel.name} spills registers: {kernel.spill_stores} bytes stored, {kernel.spill_loads} loaded"
            for kernel in report.kernels
            if kernel.spills and not re.search("[gG]eneric|double", kernel.name)
            if kernel.spill_stores + kernel.spill_loads > SMALL_SPILLS.get((kernel.name, kernel.architecture), 0)
        ]
        lines += [f"{source}, sm_{architecture}: {fault}" for fault in found]
    return lines


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
    kernels = [kernel for report in found for kernel in report.kernels]
    print(table(kernels))
    wrong = faults({(source.name, number): report for (source, number), report in zip(work, found, strict=True)})
    print("\n".join(wrong), file=sys.stderr)
    print(f"{len(kernels)} kernels of {len(sources)} files (each architecture counted), {len(wrong)} faults")
    return 1 if wrong or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
