"""Matrix products of PyTorch at full speed on processors of AMD.

On a CPU PyTorch multiplies by Intel's MKL, which keeps to AVX2 where the processor is not Intel's. One with AVX-512
multiplies float32 2.3 times as fast with it (AMD EPYC of the fifth generation). MKL asks a function of its own whether
the processor is Intel's; a library that is loaded before it answers yes.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "matrix_products"
PROCESSOR = Path("/proc/cpuinfo")
_SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def environment() -> dict[str, str]:
    """Variables of processes whose products are to be fast; none where they are anyway, or nothing can be compiled."""
    library = _library()
    if library is None or " " in str(library):  # which would name two
        return {}
    return {"LD_PRELOAD": " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))}


@cache
def _library() -> Path | None:
    try:
        processor = PROCESSOR.read_text(encoding="utf-8")
    except OSError:
        return None
    if "AuthenticAMD" not in processor or " avx512f " not in processor:
        return None
    library = FOLDER / "intel_cpu.so"
    if library.exists():
        return library
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            made = Path(folder) / library.name
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
            subprocess.run(command, input=_SOURCE, text=True, capture_output=True, check=True)
            made.replace(library)
    except (OSError, subprocess.CalledProcessError):
        return None
    return library
