"""The update rules by the kernels of flash-linear-attention, an optional package: backend "fla".

It runs sequences of the rules that flash-linear-attention has, in float16 or bfloat16, on GPUs (for tests also on CPUs,
in Triton's interpreter: ``TRITON_INTERPRET=1``). Decode steps and a layer's other operations run as for "auto", which
never takes it: no measurement in this repository says yet where it is faster.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.ops.checks import BackendUnavailable
from fairseq_fastweights.ops.reference import ungrouped

RULES = ("sum", "gated", "decay", "delta", "delta-mao", "gated-delta", "fast-weight")


def check_available(rule: str, device_type: str, dtype: torch.dtype) -> None:
    """Raises `BackendUnavailable` for another rule, dtype or device, or if the package cannot be imported."""
    if rule not in RULES:
        raise _unavailable(f"flash-linear-attention has no {rule} rule")
    if dtype not in (torch.float16, torch.bfloat16):
        raise _unavailable(f"its kernels take torch.float16 and torch.bfloat16, not {dtype}")
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise _unavailable(f"its kernels run on devices of type cuda, not {device_type}")
    try:
        importlib.import_module("fla.ops")
    except Exception as error:  # Triton's imports fail in several ways
        how = f"{type(error).__name__}: {error} (pip install flash-linear-attention)"
        raise _unavailable(f"`import fla.ops` raises {how}") from error


def run(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    starts: Tensor | None,
    beta: Tensor | None = None,
    log_key_decay: Tensor | None = None,
    log_gate: Tensor | None = None,
    **others: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Runs a rule on its gates by name; shapes and results are those of `ops.fast_weight_rule`."""
    for name, other in others.items():
        if other is not None:
            raise _unavailable(f"flash-linear-attention has no {name} of the {rule} rule")
    gate = log_key_decay if log_gate is None else log_gate
    decay = None if gate is None else gate.float()  # its sums over a chunk need more digits
    if rule == "gated" and decay is not None:  # g S + (1 - g) v k^T: a decay, with smaller values
        v = (v * -torch.expm1(decay)[..., None]).to(v.dtype)
    if rule == "fast-weight" and beta is not None:  # without an erase key, beta scales the values
        v, beta = (v * beta[..., None]).to(v.dtype), None
    if beta is None:
        kind = "gla" if decay is not None and decay.dim() == 4 else "simple_gla"
    else:
        kind = "delta_rule" if decay is None else "kda" if decay.dim() == 4 else "gated_delta_rule"
    function = getattr(importlib.import_module(f"fla.ops.{kind}"), f"chunk_{kind}")
    call = partial(function, scale=1.0, output_final_state=True)
    inputs = {"q": ungrouped(q, v), "k": ungrouped(k, v), "v": v, "beta": beta, "g": decay}
    tensors: dict[str, Any] = {name: x for name, x in inputs.items() if x is not None}
    if starts is None:
        return call(**tensors, initial_state=initial_state)
    return _documents(call, tensors, initial_state, starts)


def _documents(
    call: Callable[..., tuple[Tensor, Tensor]], tensors: dict[str, Tensor], state: Tensor | None, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs the documents of all rows as the sequences of one row, whose offsets are `cu_seqlens`."""
    v, begins = tensors["v"], starts.clone()
    begins[:, 0] = True  # a row's first document may continue from its state
    offsets = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel())
    document = begins.flatten().cumsum(0).view(starts.shape) - 1  # of each token
    states = v.new_zeros(len(offsets) - 1, v.shape[2], tensors["k"].shape[3], v.shape[3], dtype=torch.float32)
    if state is not None:
        states = states.index_copy(0, document[:, 0], state.masked_fill(starts[:, 0, None, None, None], 0))
    out, final = call(
        **{name: x.flatten(0, 1)[None] for name, x in tensors.items()}, initial_state=states, cu_seqlens=offsets
    )
    return out.view_as(v), final[document[:, -1]]


def _unavailable(reason: str) -> BackendUnavailable:
    return BackendUnavailable(f"backend='fla' was asked for: {reason}; or use backend='auto'")
