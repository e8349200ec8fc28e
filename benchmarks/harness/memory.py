"""How much memory a call takes."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

_MARK = "harness.memory.peak"


def peak(prepare: Callable[[], T], call: Callable[[T], Any], device: str) -> int:
    """Peak bytes during `call` of the tensors that `prepare` has made and of the call's own.

    On a CPU torch's profiler reports the memory of tensors, without memory that kernels allocate by themselves.
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        prepared = prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        kept = call(prepared)
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or it reports every start and stop
    # The profiler has to see the state being made: otherwise its release would not be reported.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepared = prepare()
        with record_function(_MARK):
            kept = call(prepared)
    del kept, prepared
    events = profiler.profiler.kineto_results.events()
    [start] = [event.start_ns() for event in events if event.name() == _MARK]
    most = size = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        size += event.nbytes()
        most = size if event.start_ns() < start else max(most, size)
    return most


def held(state: Any) -> int:
    """Bytes of the tensors in nested dictionaries and lists."""
    return sum(x.nbytes for x in tree_leaves(state) if isinstance(x, Tensor))
