"""Counts memory accesses of the chunked CUDA kernels, without a GPU: the emulator of the tests runs them.

    python tools/kernel_accesses.py delta "gated delta" --keys 64 --values 64 --lines 8

For each kernel of a forward and a backward pass it prints, of a block on average, wavefronts of shared memory and
sectors of global memory (32 bytes), each with those that bank conflicts and gaps cost; with --lines the lines of code
that cost the most of these. A multiprocessor has one wavefront a cycle. A number that the compiler for GPUs would keep
in a register is counted each time that the source reads it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# By name: mypy, which looks after this folder, does not look after those.
build, compiler = (getattr(import_module("tests.cuda.build"), name) for name in ("build", "compiler"))
Emulator: Any = import_module("tests.cuda.emulated").Emulator
RULE: dict[str, Any] = import_module("tests.ops.rules").RULE

DTYPES = ("bfloat16", "float16", "float32")
PLAN = "columns=64"


class Count(NamedTuple):
    """Counts of one instruction, or of several: accesses of warps; wavefronts or sectors, and those that would do."""

    accesses: int
    asked: int
    needed: int

    def of_block(self, blocks: int) -> str:
        return f"{self.asked / blocks:.0f} ({(self.asked - self.needed) / blocks:.0f})"


def total(counts: Iterable[Count]) -> Count:
    return Count(*map(sum, zip(Count(0, 0, 0), *counts, strict=True)))


class Kernel(NamedTuple):
    """A kernel's blocks, and its counts of shared and of global memory, by lines of code, the innermost first."""

    name: str
    blocks: int
    lines: dict[tuple[bool, str], Count]

    def sum(self, shared: bool) -> Count:
        return total(count for (of_shared, _), count in self.lines.items() if of_shared == shared)


def places(library: Path, addresses: Sequence[int]) -> dict[int, list[tuple[str, str]]]:
    """The function and "file:line" of each address in the loaded library, the innermost of inlined ones first."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    start = next(int(line.split("-")[0], 16) for line in mapped if line.endswith(str(library.resolve())))
    words = ["addr2line", "-afiC", "-e", str(library), *(hex(address - start - 1) for address in addresses)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    # For each address: itself (-a), then a function and a place for each level of inlining (-i).
    found: list[list[str]] = []
    for line in lines:
        if re.fullmatch("0x[0-9a-f]+", line):
            found.append([])
        else:
            found[-1].append(line)
    return {
        address: list(zip(of[::2], (re.sub(r"^.*/cuda/|\s.*", "", x) for x in of[1::2]), strict=True))
        for address, of in zip(addresses, found, strict=True)
    }


def kernels_of(emulator: Any, library: Path) -> list[Kernel]:
    """The counts since `emulation_count`, by kernel."""
    # A kernel's address is that of its function's first byte, and `places` looks one byte before a return address.
    row, rows = (ctypes.c_int64 * 7)(), []
    for i in range(emulator.library.emulation_counted()):
        emulator.library.emulation_count_of(i, row)
        rows.append(tuple(row))
    found = places(library, sorted({row[0] + 1 for row in rows} | {row[1] for row in rows}))
    noise = r"fairseq_fastweights::|\(anonymous namespace\)::|__nv_|^void |\((?!Side).*"
    kernels: dict[int, Kernel] = {}
    for kernel, address, blocks, accesses, asked, needed, shared in rows:
        known = kernels.setdefault(kernel, Kernel(re.sub(noise, "", found[kernel + 1][0][0]), blocks, {}))
        lines = [line for _, line in found[address] if not re.match(r"emulation/.*\.(h|cpp):", line)]
        # The four innermost lines tell a place within inlined functions.
        key, one = (bool(shared), " < ".join(lines[:4])), Count(accesses, asked, needed)
        known.lines[key] = total((known.lines[key], one)) if key in known.lines else one
    return list(kernels.values())


def count(rule: Any, keys: int, values: int, dtype: torch.dtype, time: int = 256) -> list[Kernel]:
    """The kernels of both passes of a rule, for one sequence with one head."""
    library = build([*sorted(ROOT.glob("cuda/chunked/*.cu")), ROOT / "cuda/choice.cu"], counts=True)
    emulator = Emulator(library)
    inputs = rule.inputs(B=1, T=time, H=1, K=keys, V=values, dtype=dtype)
    emulator.library.emulation_count()
    emulator.run(inputs, interval=time, algorithm="chunked")
    return kernels_of(emulator, library)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts memory accesses of the chunked CUDA kernels, without a GPU.")
    parser.add_argument("rules", nargs="*", default=["delta"], help=f"of {', '.join(RULE)} (default: delta)")
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--values", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--lines", type=int, default=0, help="lines of code to show for each kernel")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rules if name not in RULE]:
        parser.error(f"no such rule: {unknown[0]!r} (of {', '.join(RULE)})")
    if shutil.which("addr2line") is None or "clang" in str(compiler()):
        parser.error("needs g++ (not clang++), and addr2line, of binutils")
    os.environ.setdefault("FASTWEIGHTS_CUDA_PLAN", PLAN)
    for name in options.rules:
        print(f"{name}, {options.keys} keys, {options.values} values, {options.dtype}")
        for kernel in count(RULE[name], options.keys, options.values, getattr(torch, options.dtype)):
            shared, whole = (kernel.sum(shared).of_block(kernel.blocks) for shared in (True, False))
            print(f"  {kernel.name}: wavefronts {shared}, sectors {whole}, of each of {kernel.blocks} blocks")
            costly = sorted(kernel.lines.items(), key=lambda item: item[1].needed - item[1].asked)
            for (of_shared, line), of_line in costly[: options.lines]:
                accesses = f"{of_line.accesses / kernel.blocks:.0f} {'shared' if of_shared else 'global'}"
                print(f"    {of_line.of_block(kernel.blocks):>12} in {accesses}: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
