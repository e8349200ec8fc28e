"""Compiles the CUDA kernels, and reads ptxas's report, the PTX and the machine code. Needs no GPU.

    python tools/check_cuda_kernels.py [--architectures 80 90 100 120] [FILE ...]
    python tools/check_cuda_kernels.py --instructions [--architectures 90] [FILE ...]

The first prints registers and spills, a line for each kernel and architecture. It fails on errors, on warnings, and on
registers that are spilled to memory, except in kernels whose name has `generic`, the slow fallback for shapes without a
tuned kernel, or `double`, which checks gradients. In PTX it fails if a branch interrupts a group of `wgmma`, or if a
register that the group accesses is written after its fence, which PTX calls undefined. The default is sm_80 and sm_90a,
which take some five minutes of a core each. Files that have not changed are not compiled again: reports are kept in
build/native/reports.

The second counts the instructions that an element takes in the kernels of convolutions and gates (nvdisasm must be
beside nvcc, on PATH or in the package nvidia-cuda-nvdisasm). In each kernel that stores 16 bytes in a loop it finds the
paths through the loop's body with the most exponentials and stores, takes the cheapest, and divides its instructions by
its exponentials: each element takes one. Predicated instructions count; paths for documents and odd sizes do not. A
gate's path is that of a sigmoid, a norm's that of vectors within one thread. "once" is the smallest number of a
thread's instructions outside the loop.
"""

import argparse
import heapq
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
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


def demangled(text: str) -> str:
    """The text with kernels' names as they are written, without namespaces, parameters and return types."""
    if shutil.which("c++filt") is None:
        return text
    text = subprocess.run(["c++filt", "-p"], input=text, capture_output=True, text=True, check=True).stdout
    return re.sub(r"\(anonymous namespace\)::|fairseq_fastweights::", "", text)


def read_compiler_output(text: str) -> tuple[list[Kernel], list[str]]:
    """The kernels, and the faults, warnings and spills, in the output of ``nvcc -Xptxas -v``."""
    text, kernels = demangled(text), []
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


COUNTED = ("convolution", "gating")
STORE, EXPONENTIAL = re.compile(r"STG\.E(\.\w+)*\.128"), re.compile(r"MUFU\.EX2")


class Count(NamedTuple):
    """A kernel, its instructions for an element, and those of a thread outside the loop."""

    kernel: str
    of_element: float
    once: int


class Listing:
    """A kernel's instructions, and the indices of those that may come after each."""

    def __init__(self, text: str) -> None:
        labels: dict[str, int] = {}
        self.code: list[str] = []
        for line in text.splitlines():
            if label := re.match(r"(\.L\w+):", line):
                labels[label[1]] = len(self.code)
            elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(\S.*)", line):
                self.code.append(code[1])
        self.after: list[list[int]] = []
        for i, instruction in enumerate(self.code):
            jumps = re.search(r"\bBR[AX]\b", instruction)
            targets = [labels[label] for label in re.findall(r"\.L\w+", instruction)] if jumps else []
            # An instruction under a predicate (@P0) may also go on to the next.
            always = re.match(r"(BRA(\.U)? `|BRX|EXIT|RET)", instruction)
            self.after.append(targets if always or i + 1 == len(self.code) else [i + 1, *targets])

    def cheapest(self, start: int, ends: set[int]) -> dict[tuple[int, int], int]:
        """The fewest instructions from `start` to before any of `ends`, by the stores and exponentials among them."""
        # Dijkstra's algorithm; a state is a place in the code with the stores and exponentials on the way to it.
        marks = [(bool(STORE.search(code)), bool(EXPONENTIAL.search(code))) for code in self.code]
        most = tuple(map(sum, zip(*marks, strict=True)))
        found: dict[tuple[int, int], int] = {}
        known: set[tuple[int, int, int]] = set()
        waiting = [(0, start, 0, 0)]
        while waiting:
            cost, at, stores, exponentials = heapq.heappop(waiting)
            if (at, stores, exponentials) in known or stores > most[0] or exponentials > most[1]:
                continue
            known.add((at, stores, exponentials))
            stores, exponentials = stores + marks[at][0], exponentials + marks[at][1]
            for next_ in self.after[at] or [-1]:
                if next_ in ends:
                    found.setdefault((stores, exponentials), cost + 1)
                elif next_ >= 0:
                    heapq.heappush(waiting, (cost + 1, next_, stores, exponentials))
        return found

    def loop(self) -> tuple[int, int, int] | None:
        """The head of the loop that computes the most and stores it, its exponentials, and its instructions."""
        backward = [(i, after) for i, all_ in enumerate(self.after) for after in all_ if after <= i]
        stores = [i for i, instruction in enumerate(self.code) if STORE.search(instruction)]
        heads = {head for end, head in backward if any(head <= i <= end for i in stores)}
        # A head is the target of a jump back over a store; its passes lead from it to itself.
        passes = [(*most[::-1], -cost, head) for head in heads for most, cost in self.cheapest(head, {head}).items()]
        computed, stored, cost, head = max(passes, default=(0, 0, 0, 0))
        return (head, computed, -cost) if computed and stored else None


def nvdisasm(nvcc: Nvcc) -> str:
    """The disassembler. Raises `Unavailable` if there is none."""
    package = find_spec("nvidia")
    folders = [*(Path(place) / "cu13/bin" for place in (package.submodule_search_locations or () if package else ()))]
    folders.insert(0, nvcc.include_folder.parent / "bin")
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    if found := shutil.which("nvdisasm", path=path):
        return found
    raise Unavailable("there is no nvdisasm beside nvcc or on PATH; install nvidia-cuda-nvdisasm")


def count(nvcc: Nvcc, source: Path, architecture: int = 90) -> list[Count]:
    """The counts of a file's kernels, those without stores of 16 bytes in a loop left out."""
    disassembler = nvdisasm(nvcc)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        code = generate_code_flags([nvcc.machine_code(str(architecture))])
        subprocess.run([nvcc.command, *NVCC_FLAGS, *code, "-cubin", "-o", cubin, source], check=True)
        text = subprocess.run([disassembler, "-c", cubin], check=True, capture_output=True, text=True).stdout
    return [found for part in text.split("\t.section\t.text.")[1:] if (found := count_of(part))]


def count_of(text: str) -> Count | None:
    """The count of one kernel from its part of the listing."""
    kernel = demangled(text[: text.index(",")]).strip()
    listing = Listing(text)
    loop = listing.loop()
    if loop is None:
        return None
    head, elements, cost = loop
    # The way out of the loop begins at its head, so that a whole pass is subtracted from it.
    before = min(listing.cheapest(0, {head}).values())
    after = min(listing.cheapest(head, {-1}).values()) - min(listing.cheapest(head, {head}).values())
    return Count(kernel, cost / elements, before + max(after, 0))


def main(arguments: list[str] | None = None) -> int:
    """Checks or counts, prints the table, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Compiles the CUDA kernels and fails where they spill registers.")
    parser.add_argument("--instructions", action="store_true", help="count those of convolutions and gates instead")
    parser.add_argument("--architectures", type=int, nargs="+", metavar="SM", help="default: 80 90; of a count 90")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="default: all of cuda/ that it is for")
    options = parser.parse_args(arguments)
    counts = options.instructions
    architectures = options.architectures or (ARCHITECTURES[-1:] if counts else ARCHITECTURES)
    all_of_them = (
        [ROOT / "cuda" / f"{name}.cu" for name in COUNTED] if counts else sorted((ROOT / "cuda").rglob("*.cu"))
    )
    sources = [path.resolve() for path in options.files] or all_of_them
    try:
        nvcc = Nvcc.find()
        if unknown := [number for number in architectures if number not in nvcc.supported]:
            known = ", ".join(map(str, nvcc.supported))
            raise Unavailable(f"--architectures names {unknown[0]}; let it name some of {known}")
        work = [(source, architecture) for source in sources for architecture in architectures]
        with ThreadPoolExecutor(jobs()) as pool:
            if counts:
                made = [each for own in pool.map(partial(count, nvcc), *zip(*work, strict=True)) for each in own]
            else:
                found = list(pool.map(partial(check, nvcc), *zip(*work, strict=True)))
    except Unavailable as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if counts:
        print(*(f"{of_element:6.1f}, once {once:4}  {kernel}" for kernel, of_element, once in sorted(made)), sep="\n")
        return 0
    kernels = [kernel for own, _ in found for kernel in own]
    print(*sorted(kernels), sep="\n")
    wrong = [fault for _, faults in found for fault in faults]
    print("\n".join(wrong), file=sys.stderr)
    print(f"{len(kernels)} kernels of {len(sources)} files (each architecture counted), {len(wrong)} faults")
    return 1 if wrong or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
