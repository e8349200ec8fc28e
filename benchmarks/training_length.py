"""Training time against length: forward and backward of a call with the same number of tokens, cut into longer rows.

All rules and backends, torch's attention and the other implementations that run here, in turns at every length. The
lengths come one after the other: what else the machine does may come between them.

    python benchmarks/training_length.py [--device cuda] [--out results.json] [--figure figure.png]
"""

from functools import partial

from harness import figures, records
from harness.cases import RULES, Shape
from harness.comparison import Case, all_contestants, measure_all
from harness.program import COMMON, finish, make_parser, parse

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Heads and dimensions of the shape "long"; fewer heads on a CPU.
SETTINGS = {"tokens": 16384, "heads": 8, "key_dim": 64, "value_dim": 64, "dtype": "bfloat16"}
ON_CPU = {"heads": 2, "dtype": "float32"}
QUICK = {"tokens": 64, "heads": 1, "key_dim": 8, "value_dim": 8}
# Slower calls are not worth waiting for, in seconds.
LONGEST_CALL = 5.0


def main() -> None:
    options = parse(make_parser(__doc__, *COMMON, "--peers", "--figure", rules=RULES))
    settings = SETTINGS | (ON_CPU if options.device == "cpu" else {}) | (QUICK if options.quick else {})
    sizes = [settings[name] for name in ("heads", "key_dim", "value_dim")]
    cases = []
    for time in (16, 64) if options.quick else LENGTHS:
        shape = Shape(f"T = {time}", settings["tokens"] // time, sizes[0], time, *sizes[1:])
        cases.append(Case(shape, settings["dtype"], "forward+backward"))
    make_record = partial(records.describe_run, "training_length", options.device, settings=settings)
    record = measure_all(cases, all_contestants(options), options, LONGEST_CALL, make_record)
    finish(record, options, figures.draw_training_length)


if __name__ == "__main__":
    main()
