"""Results as JSON, with the machine and the versions."""

import contextlib
import datetime
import itertools
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

# The version of a program's method, 1 for the others; results of another version are not shown.
METHODS = {"generation": 3, "kernels": 2, "training": 2}

# The facts that rows of one comparison share; a file has them once.
COMPARISON = "part shape sizes dtype pass time beam source length first last way".split()


def save(program: str, options: Namespace, **facts: Any) -> dict[str, Any]:
    """The record of a run: program, its method, date, machine, threads, versions and `facts`; --out writes it.

    A program that saves after each comparison leaves its results even if it is stopped.
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
    machine["load before"] = round(os.getloadavg()[0], 2)  # of other work
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
    """Writes a record whole or not at all: a line for each fact, and for each comparison with all of its rows.

    Floats get eight significant digits. Raises `ValueError` for infinity and NaN, which JSON lacks.
    """
    text = json.dumps(record, allow_nan=False)
    rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.8g}"))

    def lines(name: str, value: Any) -> str:
        if name not in ("rows", "whole"):
            return json.dumps(value)
        # Rows of a comparison follow each other, since they were measured in turns.
        groups = itertools.groupby(value, key=lambda row: {fact: row[fact] for fact in COMPARISON if fact in row})
        compared = [
            json.dumps(shared | {"rows": [{fact: row[fact] for fact in row if fact not in shared} for row in rows]})
            for shared, rows in groups
        ]
        return "[\n  " + ",\n  ".join(compared) + "\n ]"

    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text("{\n" + ",\n".join(f' "{name}": {lines(name, rounded[name])}' for name in rounded) + "\n}\n")
    new.replace(path)  # a reader finds the former file or the whole new one


def read(path: Path) -> Any:
    """A file's JSON, in which each row has again the facts that it shares with others of its comparison."""

    def divide(found: dict[str, Any]) -> dict[str, Any]:
        for name in ("rows", "whole"):
            if not isinstance(found.get(name), list):
                continue
            groups = [(group, group.pop("rows", [{}])) for group in found[name]]
            found[name] = [shared | row for shared, rows in groups for row in rows]
        return found

    return json.loads(path.read_text(), object_hook=divide)


def is_current(record: dict[str, Any]) -> bool:
    """True if the program's method is still the same."""
    return record.get("method", 1) == METHODS.get(record["program"], 1)
