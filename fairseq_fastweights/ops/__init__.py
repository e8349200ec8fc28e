"""The update rules as pure functions of tensors. All are cases of one recurrence, `fast_weight_rule`.

Sequences are (batch, time, heads, dim), states (batch, heads, key_dim, value_dim). Every operation returns
``(out, final_state)``: `out` is (batch, time, heads, value_dim) in the dtype of `v`, states are float32 (float64 for
float64 inputs). Any strides will do as long as the last dimension of q, k and v is contiguous.

`backend` is "reference" (one step at a time: the definition), "chunkwise" (chunk-parallel PyTorch), "native"
(compiled kernels), "fla" (flash-linear-attention's) or "auto" (`chosen_backend`: native where it was built). A backend
that cannot run a call raises `BackendUnavailable`; none silently takes another's place. All have backward passes; only
"reference" has forward-mode derivatives (`torch.func.jvp`).

`starts` marks the first steps of documents that follow one another in a row: the state is set to 0 before each, and no
gradient passes. If v has more heads than q and k, successive heads of v share one of theirs (grouped heads).

With `in_place` the final state is written into `initial_state`, which is returned as the final state: generation, one
token at a time, then moves no more than the state. Such a call cannot be differentiated. A state that shares memory
with an input, or some of whose elements share memory, is refused.

`selective_scan`, the recurrence of Mamba, is no update rule: it has no queries and keys, but the same three forms.
"""

from __future__ import annotations

from fairseq_fastweights.ops.backends import BACKENDS
from fairseq_fastweights.ops.checks import BackendUnavailable, Gate, check_values, state_dtype
from fairseq_fastweights.ops.rules import (
    RULES,
    Rule,
    chosen_backend,
    decay_rule,
    delta_rule,
    fast_weight_rule,
    gated_delta_rule,
    gated_rule,
    sum_rule,
)
from fairseq_fastweights.ops.scan import selective_scan

__all__ = [
    "BACKENDS",
    "RULES",
    "BackendUnavailable",
    "Gate",
    "Rule",
    "check_values",
    "chosen_backend",
    "decay_rule",
    "delta_rule",
    "fast_weight_rule",
    "gated_delta_rule",
    "gated_rule",
    "selective_scan",
    "state_dtype",
    "sum_rule",
]
