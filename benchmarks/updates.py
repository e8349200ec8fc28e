"""The operators of an update of training and its waits for a GPU, counted on a CPU.

`fairseq-train` with the paper's small language model (Schlag et al. 2021), as deep and narrow: counts do not depend on
widths. `harness/updates.py` defines the operators that count. Compiled kernels for a GPU may differ from those for a
CPU, and a CUDA graph is a stand-in.

    python benchmarks/updates.py [--models delta] [--precisions bf16] [--ways plain] [--out results.json]
"""

import itertools
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from harness import records
from harness.program import finish, make_parser, parse
from harness.trainings import PARTS, PLUGIN, Training, write_text
from harness.updates import PARTS as PARTS_OF_AN_UPDATE
from harness.updates import Update, stand_in_graphs, watched
from harness.workers import options_of

# A package that is imported already counts for fairseq as one whose tasks and models are registered.
import fairseq_fastweights.models.fast_weight_lm
import fairseq_fastweights.tasks.fast_weight_language_modeling
import fairseq_fastweights.tasks.long_runs  # noqa: F401

PRECISIONS = ("fp32", "bf16", "fp16")
WAYS = {
    "plain": "",
    "compile": "--compile --no-cuda-graphs",
    "compile and replay": "--compile",
    "cuda-graphs": "--cuda-graphs",
}
"""Options of the layers."""
MODELS = ("softmax", "delta", "decay", "gated", "sum")
# fairseq-train takes the last value of an option that is given twice.
SIZES = """--decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16 --decoder-ffn-embed-dim 32
    --adaptive-input-cutoff 10,30,200 --adaptive-softmax-cutoff 10,30,200 --fp16-init-scale 4
    --tokens-per-sample 16 --batch-size 2 --max-update 8 --log-interval 100"""


def watch(data: Path, model: str, precision: str, way: str) -> Update:
    """Counts of an update of a model's training, in this process."""
    from fairseq_cli import train

    torch.compiler.reset()  # forgets earlier models
    flags = (*PARTS["lm-small"].flags_of(model, PLUGIN, "auto", quick=False), *WAYS[way].split())
    options = options_of(Training("lm-small", model, PLUGIN, flags, data, "cpu", precision))
    command = ["fairseq-train", *options, *SIZES.split()]
    with mock.patch.object(sys, "argv", command), stand_in_graphs(), watched() as update:
        train.cli_main()
    return update


def main() -> None:
    parser = make_parser(__doc__, "--threads", "--out", models=MODELS, precisions=PRECISIONS, ways=tuple(WAYS))
    parser.set_defaults(device="cpu", quick=False)
    options = parse(parser)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        data = write_text(Path(name), types=300, tokens=2 * 16 * 9)
        for way, model, precision in itertools.product(options.ways, options.models, options.precisions):
            update = watch(data, model, precision, way)
            parts = {part: sum(update.operators.get(part, {}).values()) for part in (*PARTS_OF_AN_UPDATE, "other")}
            row = {"model": model, "precision": precision, "way": way, "operators": update.total, "parts": parts}
            rows.append(row | {"compiled": update.compiled, "waits": update.waits})
    finish(records.save("updates", options, rows=rows), options)


if __name__ == "__main__":
    main()
