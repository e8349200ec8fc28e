"""Results as JSON: what was measured, and on what."""

import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = "torch numpy fairseq pytorch-fast-transformers flash-linear-attention fla-core triton".split()

# One more where a program measures something in another way than before; 1 for the others.
METHODS = {"generation": 3, "kernels": 2, "training": 2}


def save(program: str, options: Namespace, **facts: Any) -> dict[str, Any]:
    """The record of a run: program, its method, date, machine, threads and versions, and `facts` after them.

    It is written if --out says where; who saves often leaves what there is by then.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command, where = ["git", "describe", "--always", "--dirty", "--exclude", "*"], Path(__file__).parent
        versions["commit"] = subprocess.check_output(command, cwd=where, stderr=subprocess.DEVNULL, text=True).strip()
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError):
        cpu = re.search(r"^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].strip()
    machine = {"cpu": cpu, "cores": os.cpu_count(), "capability": torch.backends.cpu.get_cpu_capability()}
    machine["load before"] = round(os.getloadavg()[0], 2)  # whether there was other work when the run began
    if options.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        machine |= {"gpu": gpu.name, "gpu memory": gpu.total_memory, "compute capability": f"{gpu.major}.{gpu.minor}"}
    record = {
        **{"program": program, "method": METHODS.get(program, 1), "device": options.device},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **{"machine": machine, "threads": torch.get_num_threads(), "versions": versions, **facts},
    }
    if options.out is not None:
        write(record, options.out)
    return record


def write(record: dict[str, Any], path: Path) -> None:
    """Writes a record whole or not at all: each fact on a line, and each row. Numbers that JSON has no word for are
    refused.
    """

    def dump(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    def lines(value: Any) -> str:
        rows = isinstance(value, list) and value
        return "[\n  " + ",\n  ".join(map(dump, value)) + "\n ]" if rows else dump(value)

    text = "{\n" + ",\n".join(f" {dump(name)}: {lines(value)}" for name, value in record.items()) + "\n}"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(f"{text}\n")
    new.replace(path)


def is_current(record: dict[str, Any]) -> bool:
    """True if a record was measured in the way in which its program measures now, with the kernels that there are now.

    A record of former kernels says under "superseded" what they were.
    """
    return record.get("method", 1) == METHODS.get(record["program"], 1) and "superseded" not in record
