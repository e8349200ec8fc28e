"""The gated delta rule on a CPU against the functions that Hugging Face's Qwen3-Next runs there, in one run.

Both are given normalised queries and keys and one gate for each head. Beside them the plain delta rule, and the rule
with a gate for each key dimension (Kimi delta attention). Needs transformers:

    .venv/bin/python benchmarks/gated_delta.py [--threads 1] [--rounds 5] [--out results.json]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import records
from harness.memory import keep_freed_memory
from harness.program import make_parser, parse
from harness.turns import compare
from torch.nn import functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from fairseq_fastweights import ops

HEADS = 8
# By part: rows, steps and the dimension of a head.
SIZES = {"heads of 128": (1, 2048, 128), "heads of 64": (4, 512, 64)}
QUICK_SIZES = {"heads of 128": (1, 20, 8), "heads of 64": (2, 9, 4)}
PEER = "transformers"


def rules(batch: int, time: int, dim: int) -> dict[str, Callable[[], Any]]:
    q, k, v = (torch.randn(batch, time, HEADS, dim) for _ in range(3))
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    beta, by_head, by_key = torch.rand(batch, time, HEADS), -torch.rand(batch, time, HEADS), -torch.rand_like(k)
    for x in (q, k, v, beta, by_head, by_key):
        x.requires_grad_()
    state = torch.randn(batch, HEADS, dim, dim)
    if time > 1:
        return {
            "gated delta": lambda: ops.gated_delta_rule(q, k, v, beta, by_head),
            "delta": lambda: ops.delta_rule(q, k, v, beta),
            "Kimi delta": lambda: ops.gated_delta_rule(q, k, v, beta, by_key),
            PEER: lambda: theirs.torch_chunk_gated_delta_rule(q, k, v, g=by_head, beta=beta),
        }
    return {
        "gated delta": lambda: ops.gated_delta_rule(q, k, v, beta, by_head, initial_state=state, in_place=True),
        "delta": lambda: ops.delta_rule(q, k, v, beta, initial_state=state, in_place=True),
        "Kimi delta": lambda: ops.gated_delta_rule(q, k, v, beta, by_key, initial_state=state, in_place=True),
        PEER: lambda: theirs.torch_recurrent_gated_delta_rule(
            q, k, v, g=by_head, beta=beta, initial_state=state, output_final_state=True
        ),
    }


def main() -> None:
    parser = make_parser(__doc__, "--threads", "--rounds", "--out", "--quick", rounds=5)
    parser.set_defaults(device="cpu")
    options = parse(parser)
    keep_freed_memory()
    sizes = QUICK_SIZES if options.quick else SIZES
    rows = []
    for part, (batch, time, dim) in sizes.items():
        for kind in ("forward", "forward+backward"):
            rows += compare(part, kind, time, rules(batch, time, dim), options.rounds)
        rows += compare(part, "step", 1, rules(1, 1, dim), options.rounds)
    if options.out is not None:
        records.write(records.describe_run("gated_delta", "cpu", sizes=sizes, rows=rows), options.out)


if __name__ == "__main__":
    main()
