"""Compiles the CUDA kernels for several architectures, and reads ptxas's report and the PTX. Needs no GPU.

    python tools/check_cuda_kernels.py [--architectures 80 90 100 120] [FILE ...]

Prints registers and spills, a line for each kernel and architecture. Fails on errors, on warnings, and on registers
that are spilled to memory, except in kernels whose name has `generic`, the slow fallback for shapes without a tuned
kernel, or `double`, which checks gradients. In PTX it fails if a branch interrupts a group of `wgmma`, or if a register
that the group accesses is written after its fence, which PTX calls undefined.

The default is sm_80 and sm_90a, which take some five minutes of a core each. Files that have not changed are not
compiled again: reports are kept in build/native/reports.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from native_build import NVCC_FLAGS, ROOT, Compilation, jobs
from native_toolchain import Nvcc, Unavailable, generate_code_flags

ARCHITECTURES = (80, 90)
SMALL_SPILLS = {
    "gradients<__": 100,
    "gradients<float, ": 300,
    "outputs<float, ": 80,
    "pass_states<__": 28,
    "pass_states<float, ": 180,
}
"""Bytes that kernels whose names begin so may spill, stored and loaded together. Their cost is unmeasured."""


class Kernel(NamedTuple):
    """A kernel, compiled for one architecture, as ptxas reports it: its registers, and bytes that it spills."""

    name: str
    architecture: str
    registers: int = 0
    stored: int = 0
    loaded: int = 0

    def __str__(self) -> str:
        spills = f", spills {self.stored} + {self.loaded} bytes" if self.stored + self.loaded else ""
        return f"{self.architecture} {self.registers:3} registers  {self.name}{spills}"

    @property
    def fault(self) -> str | None:
        """The fault in the registers that it spills, if there is one."""
        allowed = next((spilled for start, spilled in SMALL_SPILLS.items() if self.name.startswith(start)), 0)
        if self.stored + self.loaded <= allowed or re.search("[gG]eneric|double", self.name):
            return None
        return f"{self.name} spills registers: {self.stored} bytes stored, {self.loaded} loaded"


def read_compiler_output(text: str) -> tuple[list[Kernel], list[str]]:
    """The kernels, and the faults, warnings and spills, in the output of ``nvcc -Xptxas -v``."""
    if shutil.which("c++filt"):  # without parameters and return types
        text = subprocess.run(["c++filt", "-p"], input=text, capture_output=True, text=True, check=True).stdout
        text = re.sub(r"\(anonymous namespace\)::|fairseq_fastweights::", "", text)
    kernels = []
    for part in re.split("Compiling entry function ", text)[1:]:
        names = re.match(r"'(.+)' for '(\w+)'", part)
        # Functions that were not inlined come after the kernel that calls them, and have no registers of their own.
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads(?:.*\n)+?.*Used (\d+) registers", part)
        assert names and spilled, f"ptxas says something else than it did: {part}"
        kernels.append(Kernel(names[1], names[2], int(spilled[3]), int(spilled[1]), int(spilled[2])))
    said = r"(?!ptxas info).*\bwarning\b|.*wgmma.mma_async instructions are serialized"
    warnings = [line.strip() for line in text.splitlines() if re.match(said, line, re.I)]
    return kernels, warnings + [kernel.fault for kernel in kernels if kernel.fault]


def read_ptx(text: str) -> list[str]:
    """The hazards of `wgmma` in PTX, each with the kernel that it is in."""
    faults = []
    for kernel in re.split(r"(?=\.entry )", re.sub("//.*", "", text))[1:]:
        name = kernel.split()[1].partition("(")[0]
        for group in re.findall(r"wgmma\.fence\.sync\.aligned;(.*?)wgmma\.commit_group", kernel, re.DOTALL):
            # The accumulators and fragments of the group's products: other instructions may not write them.
            products = re.findall(r"wgmma\.mma_async[^;]*;", group)
            accessed = {register for product in products for register in re.findall(r"%[fr]\d+", product)}
            others = re.sub(r"wgmma\.mma_async[^;]*;", "", group)
            if re.search(r"\bbra\b|^\$L", others, re.MULTILINE):
                faults.append(f"{name}: a branch within a group of wgmma")
            targets = re.findall(r"^\s*(?:@\S+\s+)?[a-z][\w.]*\s+(%[fr]\d+)", others, re.MULTILINE)
            if written := accessed.intersection(targets):
                faults.append(f"{name}: writes {min(written)} of wgmma after wgmma.fence")
    return faults


def check(nvcc: Nvcc, source: Path, architecture: int) -> tuple[list[Kernel], list[str]]:
    """Kernels and faults of `source`, from the last report if nothing changed since."""
    code = nvcc.machine_code(str(architecture))
    where, reports = f"{source.parent.name}/{source.name}, {code}", ROOT / "build" / "native" / "reports"
    flags = [*NVCC_FLAGS, "-Xptxas=-v", *generate_code_flags([code])]
    work = Compilation(source, (nvcc.command, *flags), f"{nvcc.version}\n{nvcc.more_flags}\nPTX")
    kept = reports / f"{work.key()}.txt"
    if not kept.is_file():
        reports.mkdir(parents=True, exist_ok=True)
        target, new = kept.with_suffix(".o"), kept.with_suffix(".new")
        # The PTX is an intermediate file, which nvcc would delete.
        with tempfile.TemporaryDirectory() as folder:
            command = [*work.command, "--keep", f"--keep-dir={folder}", "-c", str(source), "-o", str(target)]
            result = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            target.unlink(missing_ok=True)
            if result.returncode:
                return [], [f"{where}: does not compile:\n{result.stdout}"]
            hazards = [fault for path in Path(folder).glob("*.ptx") for fault in read_ptx(path.read_text())]
        new.write_text(result.stdout + "".join(f"warning: {fault}\n" for fault in dict.fromkeys(hazards)))
        new.replace(kept)
    kernels, faults = read_compiler_output(kept.read_text())
    return kernels, [f"{where}: {fault}" for fault in faults]


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
    if unknown := [number for number in options.architectures if number not in nvcc.supported]:
        known = ", ".join(map(str, nvcc.supported))
        print(f"error: --architectures names {unknown[0]}; let it name some of {known}", file=sys.stderr)
        return 2
    work = [(source, architecture) for source in sources for architecture in options.architectures]
    with ThreadPoolExecutor(jobs()) as pool:
        found = list(pool.map(lambda item: check(nvcc, *item), work))
    kernels = [kernel for own, _ in found for kernel in own]
    print(*sorted(kernels), sep="\n")
    wrong = [fault for _, faults in found for fault in faults]
    print("\n".join(wrong), file=sys.stderr)
    print(f"{len(kernels)} kernels of {len(sources)} files (each architecture counted), {len(wrong)} faults")
    return 1 if wrong or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
