"""Words per second of training the paper's small language model, end to end, against softmax attention.

`fairseq-train` with the architecture fast_weight_lm_wiki103_small of Schlag et al. (2021): 16 layers, width 128,
batches of 96 rows of 256 words, 267,735 word types. The softmax Transformer is the same architecture with softmax
attention in all its layers (--softmax-attention-layers all), which has fairseq's numbers and parameters. The text is
random. The commands take turns, and a command's speed is the median of what fairseq logs once it is warm.

    python benchmarks/training.py --device cuda [--precision bf16] [--out results.json]
"""

import argparse
import itertools
import json
import os
import random
import re
import sys
import tempfile
from pathlib import Path

from harness import records
from harness.commands import binarise, fairseq
from harness.program import COMMON, finish, make_parser, parse
from harness.timing import Budget, summarize

SOFTMAX = "softmax"
MODELS = (SOFTMAX, "delta", "decay", "gated", "sum")
SETTINGS = {"types": 267_735, "batch": 96, "length": 256, "updates": 60, "warm-up": 20, "log interval": 5}
QUICK_SETTINGS = {"types": 50, "batch": 2, "length": 16, "updates": 4, "warm-up": 2, "log interval": 1}
ARCHITECTURE = "--arch fast_weight_lm_wiki103_small --criterion adaptive_loss --ddp-backend legacy_ddp"
QUICK_ARCHITECTURE = """--arch fast_weight_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16
    --decoder-output-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --share-decoder-input-output-embed"""


def prepare(folder: Path, settings: dict[str, int]) -> Path:
    """Makes a text with all word types in it, and as many words as the updates read."""
    words = [f"w{i}" for i in range(settings["types"])]
    size = settings["batch"] * settings["length"] * (settings["updates"] + 1)
    # Word frequencies as in a language: by Zipf's law, without which the adaptive softmax would have no use.
    text = random.Random(1).choices(words, weights=[1 / (rank + 1) for rank in range(len(words))], k=size)
    return binarise(folder, train=[*text, "\n", *words], valid=text[: settings["length"]])  # fairseq-train opens it


def training_flags(model: str, settings: dict[str, int], options: argparse.Namespace) -> list[str]:
    """What `fairseq-train` is told beside the data."""
    fast = f"--update-rule {model} --fast-weight-backend {options.backend}"
    # Of several GPUs fairseq-train would take all, and the record speaks of one.
    return f"""--user-dir fairseq_fastweights --task fast_weight_language_modeling
        {QUICK_ARCHITECTURE if options.quick else ARCHITECTURE}
        {"--softmax-attention-layers all" if model == SOFTMAX else fast}
        {"--cpu" if options.device == "cpu" else ""} --distributed-world-size 1
        {"" if options.precision == "fp32" else f"--{options.precision}"}
        --tokens-per-sample {settings["length"]} --batch-size {settings["batch"]} --required-batch-size-multiple 1
        --max-update {settings["updates"]} --log-interval {settings["log interval"]}
        --optimizer adam --lr 0.00025 --clip-norm 0.25
        --disable-validation --no-save --num-workers 0 --log-format json --no-progress-bar""".split()


def words_per_second(log: str, warm_up: int) -> list[float]:
    """What a log of `fairseq-train --log-format json` says of its speed after so many updates."""
    logged = [json.loads(text) for text in re.findall(r"\| train_inner \| (\{.*\})$", log, re.MULTILINE)]
    speeds = [float(values["wps"]) for values in logged if int(values["num_updates"]) > warm_up]
    if not speeds:
        raise ValueError(f"the log has no speed in it after update {warm_up}")
    return speeds


def main() -> None:
    parser = make_parser(__doc__, *COMMON, "--backend", rounds=2, models=MODELS)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: %(default)s")
    options = parse(parser)
    settings = QUICK_SETTINGS if options.quick else SETTINGS
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    budget = Budget(options.budget)
    speeds: dict[str, list[float]] = {model: [] for model in (SOFTMAX, *options.models)}
    facts = {"settings": settings, "precision": options.precision, "backend": options.backend, "cut": budget.cut}
    with tempfile.TemporaryDirectory() as name:
        data = prepare(Path(name), settings)
        for number, model in itertools.product(range(options.rounds), speeds):
            if number and budget.left <= 0:
                budget.cut.append(f"{model}: {number} rounds of {options.rounds}")
                continue
            log, _ = fairseq("train", str(data), *training_flags(model, settings, options))
            speeds[model] += words_per_second(log, settings["warm-up"])
            print(f"{model}: {speeds[model][-1]:,.0f} words/s", file=sys.stderr, flush=True)
            rows = [{"model": model, "words per second": summarize(known)} for model, known in speeds.items() if known]
            records.save("training", options, **facts, rows=rows)  # if the next fails or is stopped, this is left
    finish(records.save("training", options, **facts, rows=rows), options)


if __name__ == "__main__":
    main()
