"""Reports versions, hardware, the kernels that were built, and the backend that ``auto`` takes for each rule.

    python -m fairseq_fastweights.env [--json]

It asks the operations themselves and does not import fairseq. Please add its output to bug reports.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

import torch

from fairseq_fastweights import ops
from fairseq_fastweights.ops import backends, libraries
from fairseq_fastweights.suggestions import ArgumentParser

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STEPS = {"sequence": 256, "step": 1}
"""Numbers of time steps for which the backends are reported: of training or a prompt, and of a generated token."""


def report() -> dict[str, Any]:
    """Returns the report, as a dictionary for `json.dumps`.

    "versions", "gpus" and "cpu" describe the machine. "kernels" has, by part, "ready", "reason" (why they are not
    ready and how to build them, or None), "build" (the record of the build) and "folder" (where they are). "backends"
    has a row for each rule, device and dtype: the backend that "auto" takes for a "sequence" and for a "step". The
    CPU's "instruction_set" is that of the kernels, or the error that they raise if FASTWEIGHTS_CPU_ISA asks for one
    that the CPU lacks.
    "installed elsewhere" has the folders of copies of the package that pip installed and that were not imported, as in
    the folder of a clone, whose own modules come first.
    """
    reasons = {part: libraries.load(part) for part in libraries.PARTS}
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    devices = [torch.device("cpu")] + ([torch.device("cuda", 0)] if gpus else [])
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "CUDA of torch": torch.version.cuda,
            "fairseq": version("fairseq"),
            "fairseq-fastweights": version("fairseq-fastweights"),
            "flash-linear-attention": version("flash-linear-attention"),
            "package": str(libraries.PACKAGE),
            "system": platform.platform(),
        },
        "installed elsewhere": [str(folder) for folder in libraries.elsewhere()],
        "gpus": [
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory_gib": round(gpu.total_memory / 2**30, 1),
            }
            for gpu in gpus
        ],
        "cpu": {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "instruction_set": instruction_set() if reasons["cpu"] is None else None,
        },
        "kernels": {
            part: {
                "ready": reason is None,
                "reason": reason,
                "build": libraries.record(libraries.home(part)).get(part),
                "folder": str(libraries.home(part)),
            }
            for part, reason in reasons.items()
        },
        "backends": [
            {
                "rule": rule,
                "device": device.type,
                "dtype": str(dtype).removeprefix("torch."),
                **{name: ops.chosen_backend(device, dtype, time, rule) for name, time in STEPS.items()},
            }
            for rule in ops.RULES
            for device in devices
            for dtype in DTYPES
        ],
    }


def instruction_set() -> str:
    """The instruction set of the CPU kernels, or the error that they raise."""
    try:
        return backends.cpu_instruction_set()
    except RuntimeError as error:
        return str(error).splitlines()[0]


def version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def as_text(found: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"{name:20} {value or 'none'}" for name, value in found["versions"].items()]
    # The kernels of an installed copy serve a clone that has none.
    used = {kernels["folder"] for kernels in found["kernels"].values() if kernels["ready"]}
    for folder in found["installed elsewhere"]:
        how = "whose kernels are used" if folder in used else "which is not used"
        lines.append(f"{'installed elsewhere':20} {folder}, {how}: the modules are those of the folder above")
    for index, gpu in enumerate(found["gpus"]):
        text = f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB"
        lines.append(f"{f'GPU {index}':20} {text}")
    if not found["gpus"]:
        lines.append(f"{'GPU':20} none that torch sees")
    cpu = found["cpu"]
    lines.append(f"{'CPU':20} {cpu['machine']}, {cpu['threads']} threads")
    for part, kernels in found["kernels"].items():
        if kernels["ready"]:
            build = kernels["build"] or {}
            text = f"ready: {', '.join(build.get('variants', build.get('architectures', ())))}"
            text += f"; instruction set: {cpu['instruction_set']}" if part == "cpu" else ""
            text += f"; {build.get('compiler')}; in {kernels['folder']}"
        else:
            text = kernels["reason"].removeprefix(f"the {libraries.PARTS[part]} kernels ")
        lines.append(f"{libraries.PARTS[part] + ' kernels':20} {text}")

    dtypes = list(dict.fromkeys(row["dtype"] for row in found["backends"]))
    lines += ["", "backend that auto takes, for a sequence / for a single step"]
    lines.append("".join(f"{title:23}" for title in ("rule, device", *dtypes)).rstrip())
    # One line for each rule and device, with a column for each dtype.
    cells: dict[str, dict[str, str]] = {}
    for row in found["backends"]:
        title = f"{row['rule']}, {row['device']}"
        cells.setdefault(title, {})[row["dtype"]] = f"{row['sequence']} / {row['step']}"
    for title, row in cells.items():
        lines.append("".join(f"{cell:23}" for cell in (title, *(row[dtype] for dtype in dtypes))).rstrip())
    lines.append("retention takes what decay takes")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prints the report: `python -m fairseq_fastweights.env`."""
    parser = ArgumentParser(
        prog="python -m fairseq_fastweights.env",
        description="Reports versions, hardware, the kernels that were built, and the backend that 'auto' takes.",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    found = report()
    print(json.dumps(found) if options.json else as_text(found))


if __name__ == "__main__":
    main()
