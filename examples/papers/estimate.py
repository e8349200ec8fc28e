"""How long a row would train on a GPU, and its memory and disk, before it is tried.

Hours have two bounds. At most: the measurements of a small model (speeds.json), scaled by operations, and by the
memory's bandwidth to another GPU; wider models reach higher rates. At least: half the rate of the GPU's tensor cores,
and every number that is kept for the backward pass moved three times; no training here has come near. The operations
are those of matrix products with weights, forwards and backwards; the mixers' own are a few percent more.
"""

from __future__ import annotations

import json
import logging
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.command_line import ArgumentParser, run_to_the_end
from common.files import UserError
from common.tables import format_table

from papers.rows import Places, Row, Table, plugin
from papers.translation import Translation

RECORD = json.loads(Path(__file__).with_name("speeds.json").read_text(encoding="utf-8"))

TYPES = {"wikitext103": 267_735, "wmt14": 32_768, "gpt2": 50_257, "xatl": 50_304}
"""Vocabulary entries of the experiments' data, by folder."""
TRANSLATED = 130_000_000
"""Target subwords of WMT14's training pairs: 4.5 million pairs of 29, which is an assumption."""
REACHED = 0.5
"""The share of the tensor cores' rate that a training can reach."""
MOVED = 3
"""How often each number that the backward pass needs is moved, at least: written, read, and its gradient written."""
PER_WIDTH, PER_INNER, PER_LOGIT = 17, 3, 3
"""Numbers that a word keeps in a layer, for each of its width and of its feed-forward network's, and in the head: as
counted on a CPU with `fast_weight_lm` and the delta rule. With Mamba it is 27 for the width, with attention 13."""
FILES = 3
"""Checkpoints that are on the disk at the same time: the best, the last, and one that is being written."""


@dataclass(frozen=True)
class Size:
    """The work of a training, whatever the GPU."""

    words: int  # that an update predicts
    updates: float
    most: int  # into how many batches an update may be divided; 1 if a batch must be whole
    batches: int | None  # in how many it is, if the recipe says so
    layers: float  # those of a decoder that reads a source count one and a half times
    products: int  # weights that a word is multiplied with
    parameters: int
    kept: int  # numbers that a word keeps for the backward pass

    @property
    def operations(self) -> float:
        """The floating-point operations of an update."""
        # 2 for a multiplication and an addition, 3 for the forward pass and the gradients of inputs and weights.
        return 6.0 * self.products * self.words

    def gigabytes(self, precision: str, batches: int) -> float:
        """Memory of a GPU: weights (and their copies in float32), gradients, Adam's averages, kept numbers."""
        # Bytes: a weight, its gradient and two averages of 4 each; a weight and gradient in half precision besides.
        of_parameters, of_numbers = (16, 4) if precision == "fp32" else (20, 2)
        return (self.parameters * of_parameters + self.words / batches * self.kept * of_numbers) / 1e9

    @property
    def disk(self) -> float:
        """Gigabytes of checkpoints, with weights and Adam's averages in float32."""
        return FILES * 12 * self.parameters / 1e9


def size_of(table: Table, row: Row) -> Size:
    """Reads a row's command as fairseq-train does, and builds its model without weights."""
    import torch
    from fairseq import options, utils
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY

    utils.import_user_module(SimpleNamespace(user_dir=str(plugin())))
    words = row.recipe.training(row.options, Places(Path("DATA"), Path("OUT"), Path("SOURCE")), [], {})
    dictionary = Dictionary()
    more = TYPES[table.folder] - len(dictionary)
    dictionary.symbols += map(str, range(more))
    dictionary.count += [1] * more
    logging.disable(logging.WARNING)  # the warnings about a row are in its paper
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            args = options.parse_args_and_arch(options.get_training_parser(), words[1:])
            task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, cfg=None)
            model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, task)
    finally:
        logging.disable(logging.NOTSET)
    products = sum(x.weight.numel() for x in model.modules() if isinstance(x, torch.nn.Linear))
    width, inner, head = args.decoder_embed_dim, args.decoder_ffn_embed_dim, TYPES[table.folder]
    layers = float(args.decoder_layers)
    if getattr(args, "adaptive_softmax_cutoff", None):
        # Tied to the embeddings: not among the products. A tenth of the words are beyond it, in the bands of rare ones.
        head = int(str(args.adaptive_softmax_cutoff).split(",")[0].strip("[]"))
        products += head * width
    # fairseq's own encoder has its weights a second time, for PyTorch's fast path.
    twice = re.compile(r"encoder\.layers\.\d+\.\w+")
    parameters = sum(p.numel() for name, p in model.named_parameters() if not twice.fullmatch(name))
    if isinstance(row.recipe, Translation):
        layers = args.encoder_layers + 1.5 * args.decoder_layers
        batch = row.recipe.tokens * row.recipe.accumulated
        updates, most, batches = args.max_epoch * TRANSLATED / batch, 1, row.recipe.accumulated
    else:
        recipe: Any = row.recipe
        batch, updates, batches = recipe.batch * recipe.length, float(args.max_update), None
        most = 1 if recipe.modes[0].startswith(("carried", "memory")) else recipe.batch
    kept = int(layers * (PER_WIDTH * width + PER_INNER * inner) + PER_LOGIT * head)
    return Size(batch, updates, most, batches, layers, products, parameters, kept)


@dataclass(frozen=True)
class Estimate:
    """A row on one GPU."""

    least: float  # hours
    most: float
    memory: float  # GB
    disk: float
    batches: int  # of an update


@dataclass(frozen=True)
class Speed:
    """The measurements of a model's training."""

    seconds: float  # of an update
    busy: float  # those in which the GPU was busy
    bandwidth: float  # of the GPU, terabytes per second
    size: Size


def estimate(size: Size, gpu: dict[str, Any], precision: str, speeds: Sequence[Speed]) -> Estimate:
    """Raises UserError if the GPU has no such precision."""
    if precision not in gpu["teraflops"]:
        raise UserError(f"--precision is {precision}; this GPU has {', '.join(gpu['teraflops'])}")
    room = 0.9 * gpu["gigabytes"]
    # The smallest number of batches that has room, or else the largest that divides the update.
    divisors = [number for number in range(1, size.most + 1) if size.most % number == 0]
    fitting = [number for number in divisors if size.gigabytes(precision, number) <= room]
    batches = size.batches or (fitting or divisors[-1:])[0]
    # The least is bound by the tensor cores or by the memory, one after the other.
    rate, bandwidth = REACHED * gpu["teraflops"][precision] * 1e12, gpu["terabytes per second"] * 1e12
    bytes_of = 4 if precision == "fp32" else 2
    least = size.operations / rate + MOVED * size.words * size.kept * bytes_of / bandwidth
    most = 0.0
    for speed in speeds:
        # The CPU starts operators for every batch and layer; the measured GPU was bound by its memory.
        on_cpu = speed.seconds * batches * size.layers / speed.size.layers
        on_gpu = speed.busy * size.operations / speed.size.operations
        on_gpu *= speed.bandwidth / gpu["terabytes per second"] * bytes_of / 2
        most = max(most, on_cpu + max(on_gpu, size.operations / rate))
    hours = size.updates / 3600
    return Estimate(hours * least, hours * max(least, most), size.gigabytes(precision, batches), size.disk, batches)


def measured(tables: dict[str, Table]) -> list[Speed]:
    """The contents of speeds.json."""
    found = []
    for entry in RECORD["measured"]:
        table, row = entry["row"]
        size = size_of(tables[table], tables[table].rows[row])
        seconds = size.words / (sum(entry["words per second"]) / len(entry["words per second"]))
        busy = seconds * sum(entry["busy"]) / len(entry["busy"])
        found.append(Speed(seconds, busy, RECORD["gpus"][entry["gpu"]]["terabytes per second"], size))
    return found


def stated(table: str, row: str) -> str:
    """The paper's statement about the time of its own training."""
    return next(text for pattern, text in RECORD["papers"][table] if re.search(pattern, row))


def report(rows: Sequence[tuple[str, str]], gpu: str, precision: str, tables: dict[str, Table]) -> str:
    """Estimates in Markdown, of rows by the names of their table and their own; rows of a table that are alike share a
    line.
    """
    speeds = measured(tables)
    # By the cells of a line, the rows that have them.
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows:
        found = estimate(size_of(tables[name], tables[name].rows[row]), RECORD["gpus"][gpu], precision, speeds)
        hours = f"{_rounded(found.least)} – {_rounded(found.most)}"
        sizes = (f"{found.memory:,.0f}", f"{found.disk:,.0f}", str(found.batches))
        lines.setdefault((name, hours, *sizes, stated(name, row)), []).append(f"`{row}`")
    header = [
        "rows",
        f"hours on one {gpu}, {precision}",
        "GB of the GPU",
        "GB of checkpoints",
        "UPDATE_FREQ",
        "the paper",
    ]
    cells = []
    for (name, *others), alike in lines.items():
        told = "all" if len(alike) == len(tables[name].rows) else ", ".join(alike)
        cells.append([f"`{name}`: {told}", *others])
    return format_table(header, cells)


def _rounded(hours: float) -> str:
    """Two digits: there are no more in it."""
    if hours < 0.1:
        return "0"
    digits = 1 - math.floor(math.log10(hours))
    return f"{round(hours, digits):,.{max(0, digits)}f}"


def main(arguments: list[str], tables: dict[str, Table]) -> int:
    """Runs `reproduce.py estimate` with these arguments; returns the exit status."""
    parser = ArgumentParser(
        prog="reproduce.py estimate",
        description="Estimates the rows of a paper's table on one GPU: hours of the training, from the least "
        "that the GPU allows to the most by measurements; its memory; the disk. Nothing is trained. The paper's "
        "statement about its own training stands beside it.",
        epilog="From the speeds in examples/papers/speeds.json, of one small model on an H200. Most trainings should "
        "lie between the two numbers; memory may be wrong by a factor of two.",
    )
    parser.add_argument("table", nargs="?", metavar="TABLE", choices=tables, help=f"{', '.join(tables)} (default: all)")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows of TABLE (default: all)")
    gpus, precisions = RECORD["gpus"], ("bf16", "fp16", "fp32")
    parser.add_argument("--gpu", choices=gpus, default="H100", help=f"{', '.join(gpus)} (default: %(default)s)")
    parser.add_argument("--precision", choices=precisions, help="(default: the first of these that the GPU has)")
    options = parser.parse_args(arguments)
    if options.rows and not options.table:
        parser.error("--rows goes with TABLE")

    def work() -> None:
        chosen = {options.table: tables[options.table]} if options.table else tables
        for row in options.rows or []:
            if row not in tables[options.table].rows:
                raise UserError(f"ROW is {row}; it must be one of {', '.join(tables[options.table].rows)}")
        rows = [(name, row) for name, table in chosen.items() for row in options.rows or table.rows]
        precision = options.precision or next(name for name in precisions if name in gpus[options.gpu]["teraflops"])
        print(report(rows, options.gpu, precision, tables))

    return run_to_the_end(work)
