"""The gated delta rule on a CPU against the functions that Hugging Face's Qwen3-Next runs there, in one run.

Both are given normalised queries and keys and one gate for each head. Beside them the plain delta rule, and the rule
with a gate for each key dimension (Kimi delta attention). Needs transformers:

    .venv/bin/python benchmarks/gated_delta.py [--threads 1] [--rounds 5] [--out results.json]
"""

from collections.abc import Iterator
from functools import partial

import torch
from harness.turns import Calls, Comparison, run
from torch.nn import functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from fairseq_fastweights import ops

HEADS, STEPS = 8, 100
# By part: rows, steps and the dimension of a head.
SIZES = {"heads of 128": (1, 2048, 128), "heads of 64": (4, 512, 64)}
QUICK_SIZES = {"heads of 128": (1, 20, 8), "heads of 64": (2, 9, 4)}


def rules(batch: int, time: int, dim: int) -> Calls:
    q, k, v = (torch.randn(batch, time, HEADS, dim) for _ in range(3))
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    beta, by_head, by_key = torch.rand(batch, time, HEADS), -torch.rand(batch, time, HEADS), -torch.rand_like(k)
    for x in (q, k, v, beta, by_head, by_key):
        x.requires_grad_()
    ours, peer = {}, {}
    call = theirs.torch_chunk_gated_delta_rule
    if time == 1:
        state = torch.randn(batch, HEADS, dim, dim)
        ours, peer = ({"initial_state": state, name: True} for name in ("in_place", "output_final_state"))
        call = theirs.torch_recurrent_gated_delta_rule
    calls = {
        "gated delta": partial(ops.gated_delta_rule, q, k, v, beta, by_head, **ours),
        "delta": partial(ops.delta_rule, q, k, v, beta, **ours),
        "Kimi delta": partial(ops.gated_delta_rule, q, k, v, beta, by_key, **ours),
        "transformers": partial(call, q, k, v, g=by_head, beta=beta, **peer),
    }
    # One step alone would pay for what the contestant before it left in the cache.
    return calls if time > 1 else {name: lambda c=c: [c() for _ in range(STEPS)] for name, c in calls.items()}


def comparisons(sizes: dict[str, tuple[int, int, int]]) -> Iterator[Comparison]:
    for part, (batch, time, dim) in sizes.items():
        for kind in ("forward", "forward+backward"):
            yield part, kind, time, rules(batch, time, dim)
        yield part, "steps", STEPS, rules(1, 1, dim)


def main() -> None:
    run(__doc__, "gated_delta", comparisons, SIZES, QUICK_SIZES)


if __name__ == "__main__":
    main()
