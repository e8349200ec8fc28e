"""The compiled kernels' libraries: whether they are there, are of this torch and of these sources; loading them.

`tools/native_build.py` builds up to two libraries beside the package's modules, ``_native_cpu.so`` and
``_native_cuda.so``, and writes ``_native_build.json``, a record of what it built, for which torch, from which sources,
or why it did not. They are plain libraries that register torch operators. On torch's stable ABI they run in every torch
from the record's "oldest torch" on. Others are bound to one version of torch: loading them into another one could crash
the process, so the record is read first.

In a clone Python imports the clone's own modules, also where ``pip install .`` put a copy of them and of the libraries
elsewhere. If the clone has no library, that of an installed copy is loaded, provided that it was built from the same
sources (`home`).

The environment variables ``FASTWEIGHTS_NATIVE_CPU`` and ``FASTWEIGHTS_NATIVE_CUDA`` name a library to load instead,
unchecked: one that was built with sanitizers, say.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent
RECORD = "_native_build.json"
PARTS = {"cpu": "CPU", "cuda": "CUDA"}
SHARED = "native"
"""The folder of the headers that the sources of both parts include."""
SOURCE_SUFFIXES = (".cpp", ".h", ".hpp", ".inl", ".cu", ".cuh")

_lock = threading.Lock()
_outcomes: dict[str, str | None] = {}
_homes: dict[str, Path] = {}


def load(part: str) -> str | None:
    """Loads the library of `part` ("cpu" or "cuda") into torch, the first time that it is asked for.

    Returns:
        None if it is loaded, otherwise one line that says why not and how to mend it. It raises nothing. Later calls
        return the first one's answer: a library that was not loaded is not tried again in the same process.
    """
    if part not in _outcomes:
        with _lock:
            if part not in _outcomes:
                _outcomes[part] = _load(part)
    return _outcomes[part]


def home(part: str) -> Path:
    """The folder whose library of `part` was loaded, or could not be: that of this package or of an installed copy."""
    return _homes.get(part, PACKAGE)


def elsewhere() -> list[Path]:
    """Folders of installed copies of the package other than the imported one, which in a clone is the clone's."""
    installed = metadata.distributions(name="fairseq-fastweights")
    folders = {Path(str(distribution.locate_file("fairseq_fastweights"))).resolve() for distribution in installed}
    return sorted(folder for folder in folders if folder != PACKAGE and folder.is_dir())


def library(part: str, package: Path | None = None) -> Path:
    """The path of the library of `part`, if it was built, in the folder of a package: this one, or the one given."""
    return (package or PACKAGE) / f"_native_{part}.so"


def log(part: str) -> Path:
    """The path of the compilers' output of a build of `part` that failed."""
    return PACKAGE / f"_native_{part}.log"


def record(package: Path | None = None) -> dict[str, Any]:
    """The record of the last build, if there is one: by part, "state" ("built" or "missing"), "reason" and how."""
    try:
        found = json.loads(((package or PACKAGE) / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def why_not(part: str, torch_version: str, package: Path | None = None) -> str | None:
    """Why the library of `part` would not be loaded into torch `torch_version`: one line, or None.

    Reads files only, and needs no torch. `package`: the folder of the library; None for that of this package.
    """
    entry = record(package).get(part)
    name = f"the {PARTS[part]} kernels"
    if not isinstance(entry, dict):
        return f"{name} were not built; {_rebuild(part)}"
    if entry.get("state") != "built":
        output = f"; the compiler's whole output: {log(part)}" if log(part).is_file() else ""
        return f"{name} were not built: {entry.get('reason')}{output}"
    # On the stable ABI a library runs in all later versions of torch; else in its own alone.
    oldest = entry.get("oldest torch")
    fits = entry.get("torch") == torch_version if oldest is None else _release(torch_version) >= _release(oldest)
    if not fits:
        built_for = f"{oldest} and later" if oldest else entry.get("torch")
        return f"{name} were built for torch {built_for} and this is torch {torch_version}; {_rebuild(part)}"
    if not library(part, package).is_file():
        return f"{name} were built, but {library(part, package)} is gone; {_rebuild(part)}"
    # In a clone, sources may have changed since.
    if _in_checkout() and entry.get("sources") != source_digest(CHECKOUT, part):
        return f"{name} are outdated, {part}/ or {SHARED}/ has changed since they were built; {_rebuild(part)}"
    return None


def source_digest(checkout: Path, part: str) -> str:
    """A digest of the names and contents of the sources of `part` in a checkout."""
    digest = hashlib.sha256()
    # Names too: a moved file changes includes.
    files = (path for folder in (part, SHARED) for path in (checkout / folder).rglob("*"))
    for path in sorted(path for path in files if path.suffix in SOURCE_SUFFIXES):
        digest.update(path.relative_to(checkout).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def runs_on(architectures: list[str], capability: tuple[int, int]) -> bool:
    """True if code for these architectures ("sm_80", "sm_90a", "compute_90") runs on a GPU of this capability."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        built_for = int(digits[:-1]), int(digits[-1])
        if number != digits:  # features of one GPU, which no later one need have
            runs = built_for == capability
        elif kind == "sm":
            runs = built_for[0] == capability[0] and built_for <= capability
        else:  # PTX, which the driver compiles
            runs = built_for <= capability
        if runs:
            return True
    return False


def _load(part: str) -> str | None:
    import torch

    name = f"the {PARTS[part]} kernels"
    try:
        path = named = os.environ.get(f"FASTWEIGHTS_NATIVE_{part.upper()}")
        if not path:
            reason = _find(part, str(torch.__version__))
            if reason is None and part == "cuda":
                reason = _wrong_gpu(record(home(part))[part].get("architectures", []))
            if reason is not None:
                return reason
            path = str(library(part, home(part)))
        # Registers the kernels of the operators that `kernels.py` declares.
        torch.ops.load_library(path)
        return _wrong_processor(path) if part == "cpu" and not named else None
    except Exception as error:  # whatever the fault, chunkwise runs
        told = (str(error).splitlines() or [""])[0]
        return f"{name} could not be loaded: {type(error).__name__}: {told}; {_rebuild(part)}"


def _find(part: str, torch_version: str) -> str | None:
    """Chooses the folder whose library is loaded; returns why there is none."""
    reason = why_not(part, torch_version)
    if reason is None or not _in_checkout():
        return reason
    here = part in record()
    # `pip install .` of these sources may have built a library that the clone lacks.
    for folder in elsewhere():
        other = why_not(part, torch_version, folder)
        if other is None:
            _homes[part] = folder
            return None
        reason = reason if here else f"{other}; that is of the copy in {folder}"  # nothing was tried here
    return reason


def cpu_instruction_sets(path: str) -> list[str]:
    """The instruction sets of the CPU kernels in the library at `path` that this processor has, the best last."""
    asked = ctypes.CDLL(path).fast_weights_instruction_sets
    asked.restype = ctypes.c_char_p
    return re.findall(r"\w+", asked().decode())


def _wrong_processor(path: str) -> str | None:
    """Why this processor runs none of the kernels in the library."""
    if cpu_instruction_sets(path):
        return None
    built_for = ", ".join(record(home("cpu")).get("cpu", {}).get("variants", ())) or "other processors"
    return (
        f"the CPU kernels were built for {built_for}, which this processor does not have; {_rebuild('cpu')}, after "
        "FASTWEIGHTS_BUILD_ISA=all for every processor"
    )


def _wrong_gpu(architectures: list[str]) -> str | None:
    """Why code for `architectures` runs on none, or not on all, of the GPUs that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return "the CUDA kernels were built, but torch sees no GPU"
    for device in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(device)
        if not runs_on(architectures, capability):
            return (
                f"the CUDA kernels were built for {', '.join(architectures)}, which GPU {device} of compute capability "
                f"{capability[0]}.{capability[1]} does not run; {_rebuild('cuda')}"
            )
    return None


def _release(version: str) -> list[int]:
    """[2, 10] of "2.10.0a0+cu130"."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _in_checkout() -> bool:
    return (CHECKOUT / "tools" / "native_build.py").is_file()


def _rebuild(part: str) -> str:
    """How to build them (again)."""
    if _in_checkout():
        return f"build them with `python {CHECKOUT / 'tools' / 'native_build.py'}`"
    return (
        f"build them with `FASTWEIGHTS_BUILD={part} pip install --no-cache-dir --force-reinstall --no-deps .` in the "
        "project's sources"
    )
