"""The rules against each other, against torch's attention and against other implementations, in one run.

At every shape, dtype and pass all contestants take turns (A B C A B C ...); what is shown is medians, their spread,
ratios of medians, and how far each is from what this machine's memory or arithmetic would allow. On this device:

    python benchmarks/kernels.py [--device cuda] [--budget 300] [--out results.json]

causal_product, an optional peer on the CPU, is built by benchmarks/build_causal_product.py; flash-linear-attention, an
optional one on a GPU, comes from PyPI. Who cannot take part is listed with the reason.
"""

import argparse
import itertools
from functools import partial

from harness import records
from harness.cases import DTYPES, QUICK_SHAPES, RULES, SHAPES
from harness.comparison import Case, all_contestants, measure_all
from harness.contestants import build_record
from harness.memory import keep_freed_memory
from harness.program import COMMON, add_list, finish, make_parser, parse

# Slower calls are not worth waiting for, in seconds.
LONGEST_CALL = 3.0
# Of a budget that ends early the targets come first: on a GPU training in bfloat16 at all shapes, then in float32.
ORDER_ON_GPU = ("forward+backward", "step", "forward")
DTYPES_ON_GPU = ("bfloat16", "float32", "float16")


def cases_of(options: argparse.Namespace) -> list[Case]:
    """In the order in which they are measured; on a CPU, unless it is asked for, few are in another dtype."""
    on_cpu = options.device == "cpu"
    shapes = QUICK_SHAPES if options.quick else [SHAPES[name] for name in options.shapes]
    dtypes = options.dtypes or (("float32",) if on_cpu else DTYPES_ON_GPU)
    pairs = list(itertools.product(shapes, dtypes))
    if on_cpu and options.dtypes is None and not options.quick:
        pairs.append((shapes[0], "bfloat16"))
    cases = [
        Case(shape.at(options.device), dtype, kind)
        for shape, dtype in pairs
        for kind in (("step",) if shape.steps else ("forward", "forward+backward"))
    ]
    return cases if on_cpu else sorted(cases, key=lambda c: (ORDER_ON_GPU.index(c.kind), dtypes.index(c.dtype)))


def main() -> None:
    parser = make_parser(__doc__, *COMMON, "--peers", rules=RULES, shapes=tuple(SHAPES))
    add_list(parser, "--dtypes", tuple(DTYPES), "all on a GPU; on a CPU float32, and bfloat16 at lm-small")
    options = parse(parser)
    if options.device == "cpu":
        keep_freed_memory()
    contestants = all_contestants(options)  # before the build's record, for it makes the peer importable
    make_record = partial(records.describe_run, "kernels", options.device, causal_product=build_record())
    finish(measure_all(cases_of(options), contestants, options, LONGEST_CALL, make_record), options)


if __name__ == "__main__":
    main()
