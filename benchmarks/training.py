"""Whole trainings beside peers: tokens per second, memory, how busy the GPU is, operators of an update.

`fairseq-train` with this plugin: plain, compiled (--compile --no-cuda-graphs), compiled and replayed (--compile), and
"stock" (Adam parameter by parameter; other changes of fairseq have no switch). The same sizes as a compiled Transformer
in plain PyTorch (`harness/plain_training.py`), and as DeltaNet by flash-linear-attention in the same loop, if that is
installed. Each training is a worker process. All get ready side by side, compilation included, and then take turns.

    python benchmarks/training.py --device cuda --precision bf16 [--parts lm-small] [--budget 340] [--out results.json]
"""

import argparse
import itertools
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import records
from harness.program import COMMON, finish, make_parser, parse
from harness.timing import Budget
from harness.trainings import FLA, IMPLEMENTATIONS, NAMES, ON_CPU, PARTS, PLAIN, REPLAYED, Training
from harness.workers import measure

UPDATES, QUICK_UPDATES = 150, 40  # for which there is text; then it is read again


def chosen(options: argparse.Namespace, folder: Path) -> list[tuple[Training, int]]:
    """The requested trainings, each with a guess of its GiB; writes the text of their parts."""
    found: list[tuple[Training, int]] = []
    for last, name in itertools.product((False, True), options.parts):
        part, data = PARTS[name], folder / name
        for model, implementation in part.others if last else part.runs:
            if model in options.models and implementation in options.implementations:
                flags = tuple(part.flags_of(model, implementation, options.backend, options.quick))
                given = (name, model, implementation, flags, data, options.device, options.precision)
                found.append((Training(*given), part.memory))
    for name in dict.fromkeys(training.part for training, _ in found):
        (folder / name).mkdir()
        PARTS[name].prepare(folder / name, QUICK_UPDATES if options.quick else UPDATES, options.quick)
    return found


def main() -> None:
    lists = {"parts": tuple(PARTS), "models": NAMES, "implementations": IMPLEMENTATIONS}
    parser = make_parser(__doc__, *COMMON, "--backend", rounds=3, **lists)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: %(default)s")
    parser.set_defaults(parts=None)
    options = parse(parser)
    on_cpu = options.device == "cpu"
    options.parts = options.parts or [name for name in PARTS if (name in ON_CPU) == on_cpu]
    if options.precision == "fp16":
        options.implementations = [name for name in options.implementations if name not in (PLAIN, FLA)]
    if on_cpu:  # no CUDA graphs
        options.implementations = [name for name in options.implementations if name != REPLAYED]
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    budget = Budget(options.budget)
    settings = {
        name: {"batch": part.batch, "length": part.length, "types": part.types, "flags": " ".join(part.flags.split())}
        for name, part in PARTS.items()
        if name in options.parts
    }
    facts = {"precision": options.precision, "backend": options.backend, "parts": settings, "cut": budget.cut}
    memory = math.inf if on_cpu else torch.cuda.get_device_properties(0).total_memory / 2**30
    with tempfile.TemporaryDirectory() as name:
        wanted = chosen(options, Path(name))
        if not wanted:
            parser.error("no training is left of these --parts, --models and --implementations")
        rows: list[dict[str, Any]] = []

        def save(known: list[dict[str, Any]]) -> None:
            rows[:] = known
            records.save("training", options, **facts, rows=known)  # if the next group is stopped, this is left

        measure(wanted, Path(name), options.device, options.rounds, budget, save, memory)
    finish(records.save("training", options, **facts, rows=rows), options)


if __name__ == "__main__":
    main()
