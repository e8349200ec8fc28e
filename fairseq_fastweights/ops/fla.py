"""The recurrence by the kernels of flash-linear-attention, an optional package: backend "fla".

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


def check_available(device_type: str, dtype: torch.dtype) -> None:
    """Raises `BackendUnavailable` for another dtype or device, or if the package cannot be imported."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise unavailable(f"its kernels take torch.float16 and torch.bfloat16, not {dtype}")
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise unavailable(f"its kernels run on devices of type cuda, not {device_type}")
    try:
        importlib.import_module("fla.ops")
    except Exception as error:  # Triton's imports fail in several ways
        how = f"{type(error).__name__}: {error} (pip install flash-linear-attention)"
        raise unavailable(f"`import fla.ops` raises {how}") from error


def unavailable(reason: str) -> BackendUnavailable:
    """The error that says why this backend cannot run a call."""
    return BackendUnavailable(f"backend='fla' was asked for: {reason}; or use backend='auto'")


def fast_weight_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor | None,
    beta: Tensor | None,
    log_key_decay: Tensor | None,
    log_value_decay: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.fast_weight_rule`, with an `erase` that is None or `k` itself, and no decay of values."""
    if log_value_decay is not None:
        raise unavailable("flash-linear-attention has no log_value_decay")
    if erase is not None and erase is not k:
        raise unavailable("flash-linear-attention has no erase key beside k")
    if erase is None:
        if beta is not None:  # without a correction beta scales the values
            v = (v * beta[..., None]).to(v.dtype)
        kind = "gla" if log_key_decay is not None and log_key_decay.dim() == 4 else "simple_gla"
    else:
        kind = "delta_rule" if log_key_decay is None else "kda" if log_key_decay.dim() == 4 else "gated_delta_rule"
    function = getattr(importlib.import_module(f"fla.ops.{kind}"), f"chunk_{kind}")
    call = partial(function, scale=1.0, output_final_state=True)
    tensors: dict[str, Any] = {"q": ungrouped(q, v), "k": ungrouped(k, v), "v": v}
    if erase is not None:
        tensors["beta"] = torch.ones_like(v[..., 0]) if beta is None else beta
    if log_key_decay is not None:
        tensors["g"] = log_key_decay.float()  # its sums over a chunk need more digits
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
