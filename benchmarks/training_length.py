"""Training time against length: forward and backward of a call with the same number of tokens, cut into longer rows.

All rules and backends, torch's attention and the other implementations that run here, in turns at every length. The
lengths come one after the other: what else the machine does may come between them.

    python benchmarks/training_length.py [--device cuda] [--out results.json] [--figure figure.png]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from harness import figures, records
from harness.cases import Shape
from harness.length_tables import render
from harness.measuring import Case, add_options, add_peer_options, all_contestants, measure_all, set_up

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Heads and dimensions of the shape "long"; fewer heads on a CPU.
SETTINGS = {"tokens": 16384, "heads": 8, "cpu heads": 2, "key_dim": 64, "value_dim": 64, "dtype": "bfloat16"}
QUICK_SETTINGS = {**SETTINGS, "tokens": 64, "cpu heads": 1, "key_dim": 8, "value_dim": 8}
# Slower calls are not worth waiting for, in seconds.
LONGEST_CALL = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_peer_options(parser)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the figure to this PNG")
    options = parser.parse_args()
    set_up(options)

    lengths, settings = LENGTHS, dict(SETTINGS)
    if options.quick:
        lengths, settings = (16, 64), dict(QUICK_SETTINGS)
        options.rounds = min(options.rounds, 2)
    cpu_heads = settings.pop("cpu heads")
    if options.device == "cpu":
        settings |= {"heads": cpu_heads, "dtype": "float32"}
    cases = []
    for time in lengths:
        batch = settings["tokens"] // time
        shape = Shape(
            name=f"T = {time}",
            batch=batch,
            heads=settings["heads"],
            time=time,
            key_dim=settings["key_dim"],
            value_dim=settings["value_dim"],
            cpu_batch=batch,
            origin="the same tokens in longer rows",
        )
        cases.append(Case(shape, settings["dtype"], "forward+backward"))
    make_record = partial(records.describe_run, "training_length", options.device, settings=settings)
    record = measure_all(cases, all_contestants(options), options, LONGEST_CALL, make_record)
    print(render(record))
    if options.figure is not None:
        figures.draw_training_length(record, options.figure)


if __name__ == "__main__":
    main()
