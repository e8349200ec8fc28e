"""Finds the tools that the kernels are compiled with and for: the installed torch, a C++ compiler, nvcc.

A missing tool raises `Unavailable`. `torch.utils.cpp_extension` is not used: importing it takes seconds, also where
there is nothing to do, needs setuptools, and does not keep to the architectures that the nvcc at hand knows.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST_TORCH = (2, 6)
STABLE_ABI = "2.10"
STABLE_ABI_FLAG = "-DTORCH_TARGET_VERSION=0x020a000000000000"
"""The first torch whose stable ABI has all that cpu/binding.cpp calls; the flag that asks newer headers for no more."""
OLDEST_GCC = 9
DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"


class Unavailable(Exception):
    """Why something cannot be built, and how to mend it: one line."""


@dataclass(frozen=True)
class Torch:
    """The torch that this Python would import; `cuda` is the version of CUDA that it is for, such as "13.0"."""

    folder: Path
    version: str
    cuda: str | None

    @classmethod
    def find(cls) -> Torch:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise Unavailable("the build saw no torch; install torch and build again (with uv: --no-build-isolation)")
        folder = Path(spec.origin).parent
        facts = runpy.run_path(str(folder / "version.py"))
        found = cls(folder, str(facts["__version__"]), facts.get("cuda"))
        if numbers(found.version) < OLDEST_TORCH:
            raise Unavailable(f"torch is {found.version}; install 2.6 or later and build again")
        return found

    @property
    def has_stable_abi(self) -> bool:
        return numbers(self.version) >= numbers(STABLE_ABI)

    @property
    def include_flags(self) -> list[str]:
        """As system headers, whose warnings are not ours."""
        include = self.folder / "include"
        return ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]

    @property
    def compile_flags(self) -> list[str]:
        """Standard and ABI of its headers, as torch's own files for builds say."""
        extensions = (self.folder / "utils" / "cpp_extension.py").read_text()
        standards = [int(standard) for standard in re.findall(r"-std=c\+\+(\d\d)\b", extensions)]
        config = self.folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
        abi = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", config.read_text() if config.is_file() else "")
        return [f"-std=c++{max(standards, default=17)}", f"-D_GLIBCXX_USE_CXX11_ABI={abi[1] if abi else 1}"]

    @property
    def library_folder(self) -> Path:
        return self.folder / "lib"

    @property
    def openmp_library(self) -> Path | None:
        """The libgomp of its wheels: a second one would have threads of its own, which keep the cores of these busy."""
        found = (*self.library_folder.glob("libgomp*.so*"), *self.folder.with_name("torch.libs").glob("libgomp*"))
        return min(found, default=None)

    def capabilities(self) -> list[int]:
        """The compute capabilities of the GPUs that are there, as 80 for 8.0. Imports torch."""
        try:
            import torch

            devices = range(torch.cuda.device_count())
            return sorted({10 * major + minor for major, minor in map(torch.cuda.get_device_capability, devices)})
        except Exception:  # a GPU without a driver that works: as if there were none
            return []


@dataclass(frozen=True)
class HostCompiler:
    """The C++ compiler: CXX, or the first of c++, g++ and clang++; and the first line that --version prints."""

    command: tuple[str, ...]
    version: str

    @classmethod
    def find(cls) -> HostCompiler:
        named = os.environ.get("CXX")
        commands = (candidate.split() for candidate in ([named] if named else ["c++", "g++", "clang++"]))
        command = next((command for command in commands if shutil.which(command[0])), None)
        if command is None:
            missing = f"C++ compiler {named}, which CXX names" if named else "C++ compiler"
            raise Unavailable(
                f"there is no {missing}; install one (Debian and Ubuntu: apt install g++) and build again"
            )
        version = first_line([*command, "--version"])
        if "clang" not in version and numbers(first_line([*command, "-dumpfullversion"]))[0] < OLDEST_GCC:
            problem = f"{' '.join(command)} is {version or 'no compiler that runs'}"
            raise Unavailable(f"{problem}; name g++ {OLDEST_GCC} or later or clang with CXX=... and build again")
        return cls(tuple(command), version)

    @property
    def name(self) -> str:
        return " ".join(self.command)


@dataclass(frozen=True)
class Nvcc:
    """CUDA's compiler, and the compute capabilities that it compiles for."""

    command: str
    version: str
    include_folder: Path
    supported: tuple[int, ...]

    @classmethod
    def find(cls, cuda: str | None = None) -> Nvcc:
        """The one in CUDA_HOME, on PATH or where CUDA is installed by default; of the major version of `cuda`."""
        homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
        candidates = [*(f"{home}/bin/nvcc" for home in homes if home), "nvcc", DEFAULT_NVCC]
        command = next(filter(None, map(shutil.which, candidates)), None)
        release = re.search(r"release (\d+\.\d+)", output([command, "--version"])) if command else None
        major = numbers(cuda)[0] if cuda else None
        if command is None or release is None:
            problem = f"{command} does not run" if command else "there is no nvcc in CUDA_HOME or on PATH"
            wanted = f" {major} (torch is for CUDA {cuda})" if cuda else ""
            raise Unavailable(f"{problem}; install the CUDA toolkit{wanted} and build again")
        if cuda and major != numbers(release[1])[0]:
            problem = f"{command} is of CUDA {release[1]} and torch is for CUDA {cuda}"
            raise Unavailable(f"{problem}; let CUDA_HOME name a CUDA {major} toolkit and build again")
        # nvcc may be a script that starts another one: it alone knows where its headers are.
        dry_run = output([command, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
        top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
        home = Path(top[1].strip()) if top else Path(command).resolve().parents[1]
        supported = {int(number) for number in re.findall(r"compute_(\d+)\b", output([command, "--list-gpu-arch"]))}
        return cls(command, release[1], home / "include", tuple(sorted(supported)))

    @property
    def more_flags(self) -> str:
        """The options that nvcc adds to its command line of its own accord."""
        return " ".join(filter(None, (os.environ.get(f"NVCC_{place}_FLAGS") for place in ("PREPEND", "APPEND"))))

    def machine_code(self, number: str) -> str:
        """The name of machine code for a compute capability: for 9.0 with `wgmma`, which GPUs of other ones lack."""
        return "sm_90a" if number == "90" and numbers(self.version)[0] >= 12 else f"sm_{number}"

    def architectures(self, torch: Torch, listed: str) -> list[str]:
        """The architectures to compile for: those listed, as in TORCH_CUDA_ARCH_LIST, or else those of the GPUs here.

        Returns names like "sm_80" for machine code, of GPUs here as `machine_code` has it, and "compute_90" for PTX.
        """
        known = ", ".join(f"{number // 10}.{number % 10}" for number in self.supported)
        found: list[str] = []
        for name in re.findall(r"[^;, ]+", listed):
            parts = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", name)
            if parts is None or int(parts[1] + parts[2]) not in self.supported:
                asked = f"TORCH_CUDA_ARCH_LIST names {name!r}; let it name some of {known}, as in '8.0;9.0+PTX',"
                raise Unavailable(f"{asked} and build again")
            number = parts[1] + parts[2] + parts[3]
            found += [f"sm_{number}"] + ([f"compute_{number}"] if parts[4] else [])
        if found:
            return found
        for gpu in torch.capabilities():
            # A GPU runs machine code for itself and for earlier ones of its first digit, and PTX for all earlier ones.
            newest = max((number for number in self.supported if number <= gpu), default=None)
            if newest is None:
                problem = f"{self.command} compiles for {known} and a GPU here is of {gpu // 10}.{gpu % 10}"
                raise Unavailable(f"{problem}; let CUDA_HOME name an older CUDA toolkit and build again")
            found.append(self.machine_code(str(newest)) if newest // 10 == gpu // 10 else f"compute_{newest}")
        if not found:
            asked = "FASTWEIGHTS_BUILD=cuda TORCH_CUDA_ARCH_LIST='8.0;9.0'"
            raise Unavailable(f"there is no GPU here to compile them for; build again with {asked} to name others")
        return list(dict.fromkeys(found))


def generate_code_flags(architectures: list[str]) -> list[str]:
    """nvcc's -gencode options for names like "sm_80" and "compute_90"."""
    return [f"-gencode=arch=compute_{name.partition('_')[2]},code={name}" for name in architectures]


def is_x86() -> bool:
    """True if kernels compiled here run on x86-64, of which some have AVX2 and AVX-512."""
    return platform.machine().lower() in ("x86_64", "amd64") and sys.maxsize > 2**32


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 11, 0) for 2.11.0+cu130."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else (0,)


def output(command: list[str]) -> str:
    """The output of a command on either stream; nothing if it cannot be run or fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.removesuffix("\n")


def first_line(command: list[str]) -> str:
    return output(command).partition("\n")[0]
