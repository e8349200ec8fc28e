"""The rules against each other, against torch's attention and against other implementations, in one run.

At every shape, dtype and pass all contestants take turns (A B C A B C ...); what is shown is medians, their spread,
ratios of medians, and how far each is from what this machine's memory or arithmetic would allow. On this device:

    python benchmarks/kernels.py [--device cuda] [--budget 300] [--out results.json]

causal_product, an optional peer on the CPU, is built by benchmarks/build_causal_product.py; flash-linear-attention, an
optional one on a GPU, comes from PyPI. Who cannot take part is listed with the reason.
"""

from __future__ import annotations

from functools import partial

from harness import records
from harness.cases import DTYPES, QUICK_SHAPES, RULES, SHAPES, Pass, Shape
from harness.comparison import Case, all_contestants, measure_all
from harness.contestants import build_record
from harness.memory import keep_freed_memory
from harness.program import COMMON, add_list, finish, make_parser, parse

# Slower calls are not worth waiting for, in seconds.
LONGEST_CALL = 3.0
# Of a budget that ends early the targets come first: on a GPU training in bfloat16 at all shapes, then in float32.
ORDER_ON_GPU = ("forward+backward", "step", "forward")


def passes(shape: Shape) -> tuple[Pass, ...]:
    return ("step",) if shape.steps else ("forward", "forward+backward")


def main() -> None:
    parser = make_parser(__doc__, *COMMON, "--peers", rules=RULES, shapes=tuple(SHAPES))
    add_list(parser, "--dtypes", tuple(DTYPES), "both on a GPU; on a CPU float32, and bfloat16 at lm-small")
    options = parse(parser)
    on_cpu = options.device == "cpu"
    if on_cpu:
        keep_freed_memory()

    shapes = list(QUICK_SHAPES) if options.quick else [SHAPES[name] for name in options.shapes]
    dtypes = options.dtypes or (("float32",) if on_cpu else ("bfloat16", "float32"))
    pairs = [(shape, dtype) for shape in shapes for dtype in dtypes]
    if on_cpu and options.dtypes is None and not options.quick:
        pairs.append((shapes[0], "bfloat16"))
    cases = [Case(shape.at(options.device), dtype, kind) for shape, dtype in pairs for kind in passes(shape)]
    if not on_cpu:
        cases.sort(key=lambda case: (ORDER_ON_GPU.index(case.kind), dtypes.index(case.dtype)))
    contestants = all_contestants(options)  # before the build's record, for it makes the peer importable
    make_record = partial(records.describe_run, "kernels", options.device, causal_product=build_record())
    finish(measure_all(cases, contestants, options, LONGEST_CALL, make_record), options)


if __name__ == "__main__":
    main()
