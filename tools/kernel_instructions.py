"""Counts the instructions that an element takes in the CUDA kernels of convolutions and gates, without a GPU.

    python tools/kernel_instructions.py [--architecture 90] [FILE ...]

Reads the listing of the machine code (nvcc, and nvdisasm beside it, on PATH or from the package nvidia-cuda-nvdisasm).
In each kernel that stores 16 bytes in a loop it finds the paths through the loop's body with the most exponentials and
stores, takes the cheapest, and divides its instructions by its exponentials: each element takes one. Predicated
instructions count; paths for documents and odd sizes do not. A gate's path is that of a sigmoid, a norm's that of
vectors within one thread. "once" is the smallest number of a thread's instructions outside the loop.
"""

from __future__ import annotations

import argparse
import heapq
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from native_build import NVCC_FLAGS, ROOT, jobs
from native_toolchain import Nvcc, Unavailable, generate_code_flags

FILES = ("convolution", "gating")
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


def count(source: Path, architecture: int = 90) -> list[Count]:
    """The counts of a file's kernels, those without stores of 16 bytes in a loop left out."""
    nvcc = Nvcc.find()
    disassembler = nvdisasm(nvcc)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        code = generate_code_flags([nvcc.machine_code(str(architecture))])
        subprocess.run([nvcc.command, *NVCC_FLAGS, *code, "-cubin", "-o", cubin, source], check=True)
        text = subprocess.run([disassembler, "-c", cubin], check=True, capture_output=True, text=True).stdout
    return [found for part in text.split("\t.section\t.text.")[1:] if (found := count_of(part))]


def count_of(text: str) -> Count | None:
    """The count of one kernel from its part of the listing."""
    mangled = text[: text.index(",")]
    name = subprocess.run(["c++filt", "-p", mangled], capture_output=True, text=True, check=True).stdout.strip()
    kernel = re.sub(r"\(anonymous namespace\)::|fairseq_fastweights::", "", name)
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
    parser = argparse.ArgumentParser(description="Counts instructions of CUDA kernels for an element, without a GPU.")
    parser.add_argument("--architecture", type=int, default=90, metavar="SM")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="default: convolutions and gates")
    options = parser.parse_args(arguments)
    files = options.files or [ROOT / "cuda" / f"{name}.cu" for name in FILES]
    try:
        with ThreadPoolExecutor(jobs()) as pool:
            counts = [c for own in pool.map(lambda path: count(path, options.architecture), files) for c in own]
    except Unavailable as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    for found in sorted(counts):
        print(f"{found.of_element:6.1f}, once {found.once:4}  {found.kernel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
