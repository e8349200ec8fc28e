"""The commands of the examples: the programs, and how they are written down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from common.files import UserError

ROOT = Path(__file__).resolve().parents[2]
_PRODUCTS = ROOT / "build" / "matrix_products"
_PROCESSOR = Path("/proc/cpuinfo")
_SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def one_thread() -> dict[str, str]:
    """Variables of processes that train, one on each core."""
    return {
        # Many processes of one thread each make better use of a processor than one of many threads.
        "OMP_NUM_THREADS": "1",
        # The C library would hand every large tensor back to the system, which has to clear memory for the next one.
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**33),
        **fast_products(),
    }


def fast_products() -> dict[str, str]:
    """Variables of processes whose matrix products are to be fast; none where they are, or nothing can be compiled.

    On a CPU PyTorch multiplies by Intel's MKL, which keeps to AVX2 where the processor is not Intel's. One with AVX-512
    multiplies float32 2.3 times as fast with it (AMD EPYC of the fifth generation). MKL asks a function of its own
    whether the processor is Intel's; a library that is loaded before it answers yes.
    """
    library = _library()
    if library is None or " " in str(library):  # which would name two
        return {}
    return {"LD_PRELOAD": " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))}


@cache
def _library() -> Path | None:
    try:
        processor = _PROCESSOR.read_text(encoding="utf-8")
    except OSError:
        return None
    if "AuthenticAMD" not in processor or " avx512f " not in processor:
        return None
    library = _PRODUCTS / "intel_cpu.so"
    if library.exists():
        return library
    try:
        _PRODUCTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_PRODUCTS) as folder:
            made = Path(folder) / library.name
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
            subprocess.run(command, input=_SOURCE, text=True, capture_output=True, check=True)
            made.replace(library)
    except (OSError, subprocess.CalledProcessError):
        return None
    return library


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_packages(*names: str) -> None:
    """Checks that packages are installed, before any work that would miss them at its end. Raises UserError if one is
    not.
    """
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"there is no package {name} for {sys.executable}; `make setup` installs it")


def program(name: str) -> str:
    """The path of a program: beside this Python, or on the PATH. Raises UserError if it is not installed."""
    beside = Path(sys.executable).parent / name
    found = shown(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UserError(f"there is no {name} beside {sys.executable}; `make setup` installs it")
    return found


def programs_on_path() -> None:
    """Puts the programs beside this Python on the PATH, where scripts that score a model look for them."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def shown(path: Path) -> str:
    """A path as people type it where they are."""
    here = Path(os.getcwd())
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
