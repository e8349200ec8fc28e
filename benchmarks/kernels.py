"""The rules against each other, against torch's attention and against other implementations, in one run.

At every shape, dtype and pass all contestants take turns (A B C A B C ...); what is shown is medians, their spread,
ratios of medians, and how far each is from what this machine's memory or arithmetic would allow. On this device:

    python benchmarks/kernels.py [--device cuda] [--budget 300] [--out results.json]

causal_product, an optional peer on the CPU, is built by benchmarks/build_causal_product.py; flash-linear-attention, an
optional one on a GPU, comes from PyPI. Who cannot take part is listed with the reason.
"""

from __future__ import annotations

import argparse
from functools import partial

from harness import records, targets
from harness.allocation import keep_freed_memory
from harness.cases import DTYPES, QUICK_SHAPES, SHAPES, Pass, Shape
from harness.kernel_tables import render
from harness.measuring import Case, add_options, add_peer_options, all_contestants, list_of, measure_all, set_up
from harness.peers.causal_product import build_record

# Slower calls are not worth waiting for, in seconds.
LONGEST_CALL = 3.0


def passes(shape: Shape) -> tuple[Pass, ...]:
    return ("step",) if shape.steps else ("forward", "forward+backward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_peer_options(parser)
    parser.add_argument("--shapes", type=list_of("shapes", list(SHAPES)), metavar="LIST", help=f"of {','.join(SHAPES)}")
    parser.add_argument(
        "--dtypes",
        type=list_of("dtypes", list(DTYPES)),
        metavar="LIST",
        help=f"of {','.join(DTYPES)} (default: both on a GPU; on a CPU float32, and bfloat16 at lm-small)",
    )
    options = parser.parse_args()
    set_up(options)
    if options.device == "cpu":
        keep_freed_memory()

    shapes = [SHAPES[name] for name in options.shapes or SHAPES]
    if options.quick:
        shapes = list(QUICK_SHAPES.values())
        options.rounds = min(options.rounds, 2)
    dtypes = options.dtypes or (("bfloat16", "float32") if options.device == "cuda" else ("float32",))
    cases = [
        Case(shape.at(options.device), dtype, kind) for shape in shapes for dtype in dtypes for kind in passes(shape)
    ]
    if options.device == "cuda":
        # Of a budget that ends early the targets come first: training in bfloat16 at all shapes, then in float32.
        order: list[Pass] = ["forward+backward", "step", "forward"]
        cases.sort(key=lambda case: (order.index(case.kind), dtypes.index(case.dtype)))
    if options.device == "cpu" and options.dtypes is None and not options.quick:
        cases += [Case(shape.at("cpu"), "bfloat16", kind) for shape in shapes[:1] for kind in passes(shape)]
    contestants = all_contestants(options)
    make_record = partial(records.describe_run, "kernels", options.device, causal_product=build_record())
    record = measure_all(cases, contestants, options, LONGEST_CALL, make_record)
    print(render(record))
    print(targets.render(targets.evaluate_one(record)))


if __name__ == "__main__":
    main()
