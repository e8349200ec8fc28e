"""The rules against each other, against torch's attention and against other implementations, in one run.

At every shape, dtype and pass all implementations take turns (A B C A B C ...). Shown are medians, quartiles, ratios of
medians, and the share of the machine's limit, which is its bandwidth or its arithmetic.

    python benchmarks/kernels.py [--device cuda] [--budget 300] [--out results.json]

--lengths measures training time against length instead: forward and backward of a call with the same number of tokens,
cut into longer rows. causal_product, an optional peer on the CPU, is built by benchmarks/build_causal_product.py;
flash-linear-attention, an optional one on a GPU, comes from PyPI. Absent implementations are listed with the reason.
"""

import argparse
import dataclasses
import itertools

from harness import figures
from harness.cases import QUICK_SHAPES, RULES, SHAPES, Shape
from harness.comparison import Case, measure_all
from harness.program import COMMON, finish, make_parser, parse

from fairseq_fastweights.freed_memory import keep_freed_memory

# Seconds of a call, above which an implementation is left out.
LONGEST_CALL, LONGEST_CALL_OF_LENGTHS = 3.0, 5.0
# A budget may end early: the targets come first, on a GPU training in bfloat16 at all shapes, then in float32.
ORDER_ON_GPU = ("forward+backward", "step", "forward")
DTYPES_ON_GPU = ("bfloat16", "float32", "float16")
# Heads and dimensions of the shape "long"; fewer heads on a CPU.
LENGTHS = {"tokens": 16384, "heads": 8, "key_dim": 64, "value_dim": 64, "dtype": "bfloat16"}
LENGTHS_ON_CPU = {"heads": 2, "dtype": "float32"}
QUICK_LENGTHS = {"tokens": 64, "heads": 1, "key_dim": 8, "value_dim": 8}


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases in order of measurement; on a CPU only the first shape is in half precision."""
    on_cpu = options.device == "cpu"
    shapes = QUICK_SHAPES if options.quick else [SHAPES[name] for name in options.shapes]
    few = on_cpu and not options.quick
    dtypes = ("float32",) if few else DTYPES_ON_GPU
    if on_cpu:
        shapes = [dataclasses.replace(shape, batch=shape.cpu_batch or shape.batch) for shape in shapes]
    pairs = [*itertools.product(shapes, dtypes), *([(shapes[0], "bfloat16")] if few else [])]
    cases = [
        Case(shape, dtype, kind)
        for shape, dtype in pairs
        for kind in (("step",) if shape.steps else ("forward", "forward+backward"))
    ]
    return cases if on_cpu else sorted(cases, key=lambda c: (ORDER_ON_GPU.index(c.kind), dtypes.index(c.dtype)))


def main() -> None:
    parser = make_parser(__doc__, *COMMON, "--figure", rules=RULES, shapes=tuple(SHAPES))
    parser.add_argument("--lengths", action="store_true", help="training time against length; --figure draws it")
    options = parse(parser)
    if options.figure is not None and not options.lengths:
        parser.error("--figure is of training time against length: --lengths is missing")
    if options.lengths:
        settings = LENGTHS | (LENGTHS_ON_CPU if options.device == "cpu" else {})
        settings |= QUICK_LENGTHS if options.quick else {}
        tokens, *sizes, dtype = settings.values()
        # The number of tokens stays the same: longer rows are fewer.
        cases = [
            Case(Shape(f"T = {time}", tokens // time, sizes[0], time, *sizes[1:]), dtype, "forward+backward")
            for time in ((16, 64) if options.quick else [2**n for n in range(6, 15)])
        ]
        record = measure_all("training_length", cases, options, LONGEST_CALL_OF_LENGTHS, settings=settings)
        finish(record, options, figures.draw_training_length)
        return
    if options.device == "cpu":
        keep_freed_memory()
    finish(measure_all("kernels", cases_of(options), options, LONGEST_CALL), options)


if __name__ == "__main__":
    main()
