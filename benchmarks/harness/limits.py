"""Lower bounds of times: the bytes and operations of a case over the rates measured in the same run."""

import math
import time
from typing import Any

import torch

from harness.cases import RULES, Inputs, Shape
from harness.timing import Clock


# Multiplications and additions per entry of the state and step, of the recurrence one step at a time. Forward: S is
# written and read; backward: S once more (inner states are not kept), then the gradients:
#   sum    S += k v, y = S q;  S += k v, dq = S dy, dS += q dy, dk = dS v, dv = dS k
#   a decay     and g S; g S, g dS, dg = dS . S
#   two decays  and f z S; f z S, f z dS, df and dz from P = dS . S
#   correcting  and S k; S k, dk takes S du too, dv = du = dS k, dS -= k du
# A chunked form does other operations: this is one yardstick for all.
def operations_of(rule: str) -> tuple[int, int]:
    """The numbers of a rule, forward and backward."""
    decays, corrects = sum(gate.log for gate in RULES[rule].gates), RULES[rule].corrects
    return 4 + decays + 2 * corrects, 10 + (1 + 3 * decays if decays else 0) + 6 * corrects


_COPY_BYTES = (4 << 20, 16 << 20, 64 << 20, 256 << 20)


def measure_rates(device: str, dtypes: dict[str, torch.dtype], clock: Clock, quick: bool = False) -> dict[str, Any]:
    """Measures this machine.

    "copy": bytes per second of a copy, by its bytes read and written ("268435456"); "matmul": operations per second of
    a square matrix product by dtype, float32 in full precision.
    """
    sizes = _COPY_BYTES[:1] if quick else (4 << 30,) if device == "cuda" else _COPY_BYTES  # a GPU's: beyond its cache
    copies, products = {}, {}
    for size in sizes:
        source = torch.rand(size // 8, device=device)
        target = torch.empty_like(source)
        copies[str(size)] = size / _best(lambda s=source, t=target: t.copy_(s), clock, quick)
    width = 128 if quick else 8192 if device == "cuda" else 2048
    torch.set_float32_matmul_precision("highest")  # torch's default
    for name, dtype in dtypes.items():
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in "ab")
        products[name] = 2 * width**3 / _best(lambda a=a, b=b: a @ b, clock, quick)
    return {"copy": copies, "matmul": products}


def _best(call: Any, clock: Clock, quick: bool) -> float:
    """The least time of at least three calls, and of as many as fit in half a second."""
    call()
    end = time.perf_counter() + (0.05 if quick else 0.5)
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() < end:
        times.append(clock.seconds(call, 1))
    return min(times)


def limit_of(shape: Shape, rule: str, dtype: str, kind: str, inputs: Inputs, rates: dict[str, Any]) -> dict[str, Any]:
    """The least that a case takes on a machine of these rates. `rule` may be "softmax".

    "bytes", every input read once per pass, every output and gradient written once, a step's state both;
    "operations", by `operations_of`, for softmax attention its matrix products over the causal half; "seconds", the
    larger of bytes over bandwidth and operations over rate; "binding", which it is: "bandwidth" or "arithmetic".
    """
    softmax, both = rule == "softmax", kind == "forward+backward"
    read = (inputs.wide_q, inputs.wide_k, inputs.v) if softmax else (inputs.q, inputs.k, inputs.v, *inputs.gates[rule])
    given, out = sum(x.nbytes for x in read), inputs.d_out.nbytes
    # Backward reads the inputs again and the output's gradient, and writes a gradient for each input.
    moved = 3 * given + 2 * out if both else given + out
    moved += 0 if inputs.state is None else 2 * inputs.state.nbytes
    if softmax:
        # Two products forward, five backward (the scores once more), each over the pairs on and below the diagonal.
        operations = shape.time * (shape.time + 1) // 2 * 2 * shape.value_dim * (7 if both else 2)
    else:
        operations = shape.time * shape.key_dim * shape.value_dim * sum(operations_of(rule)[: 1 + both])
    operations *= shape.batch * shape.heads
    # The rate of the measured copy whose size is next to this: a small one stays in the caches, as small inputs do.
    size = min(rates["copy"], key=lambda size: abs(math.log(int(size) / moved)))
    times = {"bandwidth": moved / rates["copy"][size], "arithmetic": operations / rates["matmul"][dtype]}
    binding = max(times, key=lambda name: (times[name], name))
    return {"bytes": moved, "operations": operations, "seconds": times[binding], "binding": binding}
